"""AdamW's moments on the host between updates: each update brings them over bucket by bucket, and takes them back.

    side stream   fetch 0 | fetch 1      | return 0, fetch 2 | ...
    main stream           | update 0     | update 1          | ...

So a device holds the moments of three buckets at most, whatever the size of the model, and copying overlaps with the
arithmetic. The bits are those of an update in one go. Where device and host are the same memory, as on a CPU, nothing
is copied, but the order is the same. It knows nothing about models, and of the optimizer only its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from services.common.config.policy import OFFLOAD_BUCKET_BYTES

MOMENTS = ("exp_avg", "exp_avg_sq")

Parameter = torch.nn.Parameter
Moments = dict[str, torch.Tensor]  # by name, one parameter's


class MomentsOnHost:
    """Steps an AdamW whose moments it keeps."""

    def __init__(self, adamw: torch.optim.AdamW, bucket_bytes: int = OFFLOAD_BUCKET_BYTES) -> None:
        self._adamw = adamw
        self._parameters = [p for group in adamw.param_groups for p in group["params"]]
        self._buckets = list(_buckets(self._parameters, bucket_bytes))
        device = self._parameters[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[Parameter, Moments] = {}
        for parameter in self._parameters:
            self._host[parameter] = {name: _host_zeros(parameter) for name in MOMENTS}
            # Made here, or the optimizer would make them on the device at its first step.
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            adamw.state[parameter] = {"step": step, **self._host[parameter]}
        adamw.register_load_state_dict_post_hook(lambda _: self._settle())

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient; gradients are gone afterwards."""
        gradients = {p: p.grad for p in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None  # the optimizer passes over parameters without one
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
        # Until then the memory of what was just allocated may be in use.
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
        """Take what a checkpoint has put beside the parameters."""
        for parameter, host in self._host.items():
            state = self._adamw.state[parameter]
            for name, moment in host.items():
                if state[name] is not moment:
                    _local(moment).copy_(_local(state[name]))
                    state[name] = moment


def _buckets(parameters: list[Parameter], max_bytes: int) -> Iterator[list[Parameter]]:
    """Neighbours together, up to ``max_bytes`` of parameters held here, and at least one."""
    bucket: list[Parameter] = []
    size = 0
    for parameter in parameters:
        local = _local(parameter.detach())
        num_bytes = local.numel() * local.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += num_bytes
    yield bucket


def _host_zeros(parameter: Parameter) -> torch.Tensor:
    """Pinned beside a GPU, so that copies do not wait for one another."""
    made = torch.empty_like(parameter, device="cpu", pin_memory=parameter.device.type == "cuda", requires_grad=False)
    return made.zero_()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
