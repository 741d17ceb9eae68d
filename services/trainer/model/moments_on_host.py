"""Keeps AdamW's moments on the host between updates: each update moves them to the device and back, by buckets.

    side stream   fetch 0 | fetch 1      | return 0, fetch 2 | ...
    main stream           | update 0     | update 1          | ...

So a device holds the moments of three buckets at most, for any size of the model, and copying overlaps with arithmetic.
The result has the same bits as one update of all parameters. On a CPU the order is the same, without copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from services.common.buckets import in_buckets
from services.common.config.training.policy import OFFLOAD_BUCKET_BYTES

MOMENTS = ("exp_avg", "exp_avg_sq")

Parameter = torch.nn.Parameter
Moments = dict[str, torch.Tensor]  # by name, one parameter's


class MomentsOnHost:
    """Runs the updates of an AdamW and keeps its moments."""

    def __init__(self, adamw: torch.optim.AdamW, bucket_bytes: int = OFFLOAD_BUCKET_BYTES) -> None:
        self._adamw = adamw
        self._parameters = [p for group in adamw.param_groups for p in group["params"]]
        self._buckets = list(in_buckets(self._parameters, _local_bytes, bucket_bytes))
        device = self._parameters[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[Parameter, Moments] = {}
        for parameter in self._parameters:
            self._host[parameter] = {name: _host_zeros(parameter) for name in MOMENTS}
            # Created here: otherwise the optimizer creates them on the device at its first step.
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            adamw.state[parameter] = {"step": step, **self._host[parameter]}
        adamw.register_load_state_dict_post_hook(lambda _: self._settle())

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, and clear the gradients."""
        gradients = {p: p.grad for p in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None  # the optimizer skips parameters without a gradient
        ahead = self._fetch(self._buckets[0])
        for index, bucket in enumerate(self._buckets):
            fetched = ahead
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            ahead = self._fetch(self._buckets[index + 1]) if index + 1 < len(self._buckets) else {}
            for parameter in bucket:
                parameter.grad = gradients.pop(parameter)
                self._adamw.state[parameter].update(fetched[parameter])
            self._adamw.step()
            for parameter in bucket:
                parameter.grad = None
            self._return(fetched)
        if self._stream is not None:
            self._stream.synchronize()  # a checkpoint may read them next

    def _fetch(self, bucket: list[Parameter]) -> Mapping[Parameter, Moments]:
        if self._stream is None:
            return {p: self._host[p] for p in bucket}
        fetched = {p: {name: torch.empty_like(p) for name in MOMENTS} for p in bucket}
        # Until then the memory of the new allocations may be in use.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for parameter, moments in fetched.items():
                for name, moment in moments.items():
                    _local(moment).copy_(_local(self._host[parameter][name]), non_blocking=True)
        return fetched

    def _return(self, fetched: Mapping[Parameter, Moments]) -> None:
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for parameter, moments in fetched.items():
                for name, moment in moments.items():
                    _local(self._host[parameter][name]).copy_(_local(moment), non_blocking=True)
                    _local(moment).record_stream(self._stream)
                self._adamw.state[parameter].update(self._host[parameter])

    @torch.no_grad()
    def _settle(self) -> None:
        """Move moments that a checkpoint restored on the device to the host."""
        for parameter, host in self._host.items():
            state = self._adamw.state[parameter]
            for name, moment in host.items():
                if state[name] is not moment:
                    _local(moment).copy_(_local(state[name]))
                    state[name] = moment


def _local_bytes(parameter: Parameter) -> int:
    local = _local(parameter.detach())
    return local.numel() * local.element_size()


def _host_zeros(parameter: Parameter) -> torch.Tensor:
    """Zeros on the host; pinned for a GPU, so that copies run asynchronously."""
    made = torch.empty_like(parameter, device="cpu", pin_memory=parameter.device.type == "cuda", requires_grad=False)
    return made.zero_()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
