"""FSDP2: a model whose weights lie in rows over all ranks, and sketches whose rows lie where the weights' do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from logra_ref.holding import Holding
from scaled.policy import Policy
from scaled.ranks import Ranks


class ShardedRows(Holding):
    """Rows as FSDP2 deals them out: ⌈d/world⌉ to each rank in turn, fewer or none to the last."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.total = ranks, ranks.total
        self._group = dist.new_group()  # its own, or every sum would wait for the weights that are gathered meanwhile
        self._pending: list[Callable[[], None]] = []

    def own(self, weight: Tensor) -> Tensor:
        """Raises ``RuntimeError`` for a weight that is gathered: what was changed there would be lost."""
        if not isinstance(weight, DTensor):
            raise RuntimeError("a weight is gathered, and a change of it would be lost: reshard the model first")
        return weight.detach().to_local()

    def collect(self, contribution: Tensor, add: Callable[[Tensor], None]) -> None:
        """One sum is under way while backward goes on to the next layer; all are done when it ends."""
        rows, rank = contribution.shape
        share = math.ceil(rows / self.ranks.world)
        summed = contribution.new_empty(share, rank)
        work = dist.reduce_scatter_single(summed, self._padded(contribution, share), group=self._group, async_op=True)
        held = min(max(rows - self.ranks.rank * share, 0), share)

        def finish() -> None:
            work.wait()
            add(summed[:held])

        if not self._pending:
            Variable._execution_engine.queue_callback(self._finish_all)
        self._pending.append(finish)
        if len(self._pending) > 1:
            self._pending.pop(0)()

    def whole(self, rows: Tensor, count: int) -> Tensor:
        share = math.ceil(count / self.ranks.world)
        gathered = rows.new_empty(share * self.ranks.world, rows.shape[1])
        padded = nn.functional.pad(rows, (0, 0, 0, share - len(rows)))
        dist.all_gather_single(gathered, padded.contiguous(), group=self._group)
        return gathered[:count]

    def _padded(self, contribution: Tensor, share: int) -> Tensor:
        missing = share * self.ranks.world - len(contribution)
        return nn.functional.pad(contribution, (0, 0, 0, missing)).contiguous()

    def _finish_all(self) -> None:
        while self._pending:
            self._pending.pop(0)()


def shard(policy: Policy, ranks: Ranks, compute: torch.dtype) -> None:
    """Deal the weights of a policy out over all ranks: each decoder layer alone, the embedding too if the output layer
    has other weights, and that one if it is not trained; what is left as one unit.

    Products are made in ``compute``; weights stay in their own type. Gradients are summed, not averaged, since the
    loss is normalised by the tokens of all ranks.
    """
    model, policy.shares_prompts = policy.model, False
    units = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # else both need it, at either end of a pass
        units.append(embedding)
        if not policy.trains_head:
            # Called on one piece of the positions after the other, and gathered once for all of them. A trained one
            # would have its gradients summed over the ranks piece by piece.
            fully_shard(head, mesh=ranks.mesh, reshard_after_forward=False, mp_policy=_precision(model, compute))
            head.set_reshard_after_backward(False)
    for unit in units:
        fully_shard(unit, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=_precision(model, compute))
    fully_shard(policy, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=_precision(model, compute, whole=True))
    register_fsdp_forward_method(policy, "readout")
    for module in fsdp_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _precision(model: PreTrainedModel, compute: torch.dtype, *, whole: bool = False) -> MixedPrecisionPolicy:
    stored = next(model.parameters()).dtype
    if compute == stored:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=stored, output_dtype=stored if whole else None)


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """All units, the root first."""
    return (inner for inner in module.modules() if isinstance(inner, FSDPModule))


def reshard(module: nn.Module) -> None:
    """Give gathered weights up, so that ``.weight`` is this rank's part. After a forward pass without backward the
    root's are still there, and a change of the parts would be lost in them."""
    for unit in fsdp_modules(module):
        unit.reshard()


def fill(policy: Policy, source: PreTrainedModel | None, device: torch.device, ranks: Ranks) -> None:
    """Give a sharded model on the meta device the weights and buffers of ``source``, which rank 0 has."""
    policy.to_empty(device=device)
    model = policy.model
    weights = source.state_dict() if ranks.first else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    held = dict(source.named_buffers()) if ranks.first else {}
    for name, buffer in model.named_buffers():  # those that no file has too, as rotary frequencies
        if ranks.first:
            buffer.copy_(held[name])
        dist.broadcast(buffer, 0)


def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight as a whole, in its own type, one after the other, to every rank; a tied one once."""
    reshard(model)
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach())


def whole(x: Tensor) -> Tensor:
    """All of a tensor that may lie in parts, to every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x
