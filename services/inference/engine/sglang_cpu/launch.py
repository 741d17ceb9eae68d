"""Start the true SGLang server on a machine without a GPU. Takes SGLang's own command line arguments.

A script, run by the interpreter of an environment that holds SGLang and not this project (``make sglang-env``):

    .venv-sglang/bin/python services/inference/engine/sglang_cpu/launch.py --model-path DIR --device cpu ...

The module ``sgl_kernel`` beside this file is found because Python puts a script's folder first on the path.
"""

import os

# Before torchvision, so before sglang: torchvision's public wheel is linked to CUDA, its operators do not load beside a
# torch for the CPU, and its import fails where it describes two operators that nobody declared. At module level, because
# SGLang spawns its workers, and a spawned process imports its parent's main module again.
import torch

_declared = torch.library.Library("torchvision", "DEF")  # kept: what it declares lives as long as it does
_declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def main() -> None:
    """Serve until told to stop; the workers end with the server."""
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
