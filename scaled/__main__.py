"""``torchrun --nproc-per-node N -m scaled train CONFIG``: the command ``logra``, on several ranks."""

from scaled.cli import main

main()
