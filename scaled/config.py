"""The configuration of a run, checked by pydantic. ``config_file`` reads it from YAML and dotted ``key=value``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from logra_ref.projection import Kind
from logra_ref.sketch import DEFAULT_TARGETS
from scaled.config_data import DataConfig, EvaluationConfig, ModelConfig, RewardConfig, RolloutConfig
from scaled.config_engines import EngineConfig, LaunchConfig
from scaled.config_methods import DenseConfig, LoraConfig
from scaled.section import (
    MOST_COUNTED,
    Count,
    CountOrZero,
    Fraction,
    LocalPath,
    NonNegative,
    Positive,
    Section,
    Text,
)


class LossConfig(Section):
    """From rewards to the loss."""

    kind: Literal["ppo", "reinforce", "grpo"] = "ppo"
    """The loss; with one update a batch all three have the gradient of the policy gradient."""
    advantage: Literal["running_baseline", "group_relative"] = "running_baseline"
    """Reward minus a running average over batches, or minus the mean of the responses to the same problem."""
    baseline_weight: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.1
    """The weight of the newest batch in the running average."""
    clip: Positive = 0.2
    """PPO's and GRPO's ε: ratios beyond 1 ± ε give no gradient in the direction they overshoot."""
    importance_cap: Positive = 2.0
    """The largest weight π_trainer/π_engine of a token."""


class LograConfig(Section):
    """Sketch, direction and nominal step."""

    rank: Annotated[int, Field(gt=0, le=2**20)] = 256
    """r, the columns of a sketch."""
    kind: Kind = "rademacher"
    """How the projection is drawn."""
    refresh: Literal["every_update", "fixed"] = "every_update"
    """Whether each update has a new projection."""
    direction: Literal["row_adam", "sgd"] = "row_adam"
    """RowAdam (Appendix B) or the sketch itself."""
    update_ratio: Positive = 6e-5
    """ρ, the norm of the proposal over the norm of the selected weights."""
    beta2: Fraction = 0.95
    """RowAdam's decay of the second moment."""
    epsilon: Positive = 1e-8
    """RowAdam's ε, relative to the mean root."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] = DEFAULT_TARGETS
    """The ends of the names of the linear layers that are trained."""


class ControlConfig(Section):
    """The step multiplier α and the KL budget it is held to."""

    enabled: bool = True
    """Whether α follows the predicted KL. Without it α = 1."""
    alpha_max: Positive = 3.0
    """The cap of the step multiplier."""
    budget_max: Positive = 2e-4
    """δ_max, the KL budget of the first update (nats a token)."""
    budget_min: NonNegative = 2e-5
    """δ_min, the KL budget from update `horizon` on."""
    horizon: Count = 300
    """H, the updates over which the budget falls as a cosine."""
    probe: Literal["jvp", "finite_difference", "exact"] = "jvp"
    """How the predicted KL is measured."""
    positions: Count | None = None
    """Responses are drawn at random for the probe until they have so many positions (default 256)."""
    responses_per_rank: Count | None = None
    """Instead of `positions`: a number of responses (the paper: 2)."""
    mismatch: bool = True
    """Whether the measured engine–trainer mismatch is taken off the budget."""

    def responses(self, ranks: int) -> int | None:
        """Responses of the probe on all ranks together; None if they are drawn by positions."""
        return self.responses_per_rank and self.responses_per_rank * ranks

    @model_validator(mode="before")
    @classmethod
    def _default_positions(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("positions") is None and data.get("responses_per_rank") is None:
            return data | {"positions": 256}
        return data

    @model_validator(mode="after")
    def _probe_size(self) -> ControlConfig:
        if self.positions and self.responses_per_rank:
            raise ValueError("give either `positions` or `responses_per_rank`, not both")
        if self.budget_min > self.budget_max:
            raise ValueError(f"`budget_min` {self.budget_min} is above `budget_max` {self.budget_max}")
        return self


class CheckpointConfig(Section):
    """When model and state are saved."""

    every: CountOrZero = 50
    """Save after every so many updates (0: only after the last, and when interrupted)."""
    keep_last: Count = 2
    """Checkpoints kept; older ones are removed once a newer one is complete."""


class RunConfig(Section):
    """Everything about a run."""

    run: LocalPath
    """The folder of the run."""
    seed: int = 0
    """Every random choice of the run follows from it."""
    method: Literal["logra", "dense", "lora"] = "logra"
    """LoGRA, dense Adam, or LoRA adapters by AdamW."""
    updates: Count
    """Train until so many updates were applied."""
    microbatch: Count = 1
    """Responses in one forward and backward pass."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads of torch; its default if not given."""
    reward: str = "exact_match"
    """`exact_match`; `verifier`, each row's own; or the path of a function of yours: `my_package.my_module:score`."""
    skip_without_signal: bool = True
    """Skip a batch whose advantages are all equal; η would make a full step of its noise."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What to do when a loss, a sketch or the predicted KL is not finite; the weights are left untouched."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where the numbers of the log go too: TensorBoard (files in the run's folder), Weights & Biases."""
    policy_sync: Literal["factors", "full"] = "factors"
    """How engines get an update: as LoGRA's factors (±1 projections, new ones each time), or as all weights."""
    model: ModelConfig
    """The model that is trained: a section with `path`."""
    data: DataConfig
    """The problems: a section with `task` or `file`."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled."""
    rewards: RewardConfig = RewardConfig()
    """How responses are graded."""
    loss: LossConfig = LossConfig()
    """Advantages and loss."""
    logra: LograConfig = LograConfig()
    """LoGRA's sketch, direction and nominal step."""
    control: ControlConfig = ControlConfig()
    """The step multiplier α and its KL budget."""
    dense: DenseConfig = DenseConfig()
    """Adam, for `method: dense`."""
    lora: LoraConfig = LoraConfig()
    """Adapters and AdamW, for `method: lora`."""
    engine: EngineConfig = EngineConfig()
    """The engines, for `rollout.backend: vllm`."""
    launch: LaunchConfig = LaunchConfig()
    """What `logra launch` starts."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How and when held-out problems are answered."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the model and the run's state are saved."""

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The engines of this run."""
        return self.engine.launched or self.engine.urls

    @property
    def longest(self) -> int | None:
        """The most tokens that engines take; None without engines or without a limit but the model's."""
        return (self.engine.max_model_len or self.rollout.context) if self.rollout.backend == "vllm" else None

    @property
    def sends_factors(self) -> bool:
        """Whether engines follow by factors."""
        return self.rollout.backend == "vllm" and self.policy_sync == "factors"

    @model_validator(mode="after")
    def _factors(self) -> RunConfig:
        if self.sends_factors:
            wanted = {"method": "logra", "logra.kind": "rademacher", "logra.refresh": "every_update"}
            had = {"method": self.method, "logra.kind": self.logra.kind, "logra.refresh": self.logra.refresh}
            for name, value in wanted.items():
                if had[name] != value:
                    raise ValueError(
                        f"`policy_sync` factors needs `{name}` {value}, not {had[name]}; set policy_sync=full"
                    )
        return self

    @model_validator(mode="after")
    def _rounding(self) -> RunConfig:
        if (rounding := self.engine.rounding) != "exact":
            if self.engine.dtype != "bfloat16":
                raise ValueError(f"only bf16 engines round: `engine.rounding` {rounding} needs `engine.dtype` bfloat16")
            if self.engine.verify_every:
                raise ValueError(f"`engine.rounding` {rounding} leaves bits that differ; set engine.verify_every=0")
        return self

    @model_validator(mode="after")
    def _responses(self) -> RunConfig:
        if self.loss.advantage == "group_relative" and self.rollout.responses_per_prompt < 2:
            raise ValueError("`loss.advantage` group_relative needs `rollout.responses_per_prompt` of 2 or more")
        split = self.data.held_out if self.data.held_out_file is None else 0
        for a, b, name in (
            (self.rollout.prompts, self.rollout.responses_per_prompt, "`rollout.prompts` × `responses_per_prompt`"),
            (split, self.evaluation.samples, "`data.held_out` × `evaluation.samples`"),
        ):
            if a * b > MOST_COUNTED:
                raise ValueError(f"{name} is {a} × {b} responses at once; make it {MOST_COUNTED} at most")
        return self
