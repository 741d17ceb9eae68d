"""Start the true SGLang server on a machine without a GPU. Takes SGLang's own command line arguments.

A script, run by the interpreter of an environment that holds SGLang and not this project (``make sglang-cpu-env``):

    .venv-sglang-cpu/bin/python extras/sglang/server/launch.py --model-path DIR --device cpu ...

The module ``sgl_kernel`` beside this file is found because Python puts a script's folder first on the path.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

# Before torchvision, so before sglang: torchvision's public wheel is linked to CUDA, its operators do not load beside a
# torch built for CPUs, and its import fails where it describes two undeclared operators. At module level, because
# SGLang spawns its workers, and a spawned process imports its parent's main module again.
import torch

if torch.version.cuda is None:
    _declared = torch.library.Library("torchvision", "DEF")  # kept: the declarations live as long as the library object
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` without its argument ``pin_memory``: adapters ask for pinned memory, which torch has with a GPU only."""

    @functools.wraps(make)
    def made(*arguments: Any, **settings: Any) -> Any:
        settings.pop("pin_memory", None)
        return make(*arguments, **settings)

    return made


for _name in ("arange", "empty", "tensor", "zeros"):
    setattr(torch, _name, _without_pinning(getattr(torch, _name)))
setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010 - mypy refuses the assignment


def main() -> None:
    """Serve until a stop signal; the workers end with the server."""
    import sys

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
