"""vLLM's connector of hidden states on its CPU build, where the stock one ends the engine.

Loaded by vLLM itself (kv_connector_module_path). Two things are not there in vLLM 0.32.0+cpu, both met when
the first request has finished (example_hidden_states_connector.py): pinned memory ("pin_memory=True requires
a CUDA or other accelerator backend", _submit_async_write), and a `query` of the events that stand in for
CUDA's (get_finished). Everything else is the stock connector's.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """See the module."""

    def _submit_async_write(self, pending: Any) -> None:
        empty_like = torch.empty_like

        def unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return empty_like(*arguments, **options)

        with mock.patch.object(torch, "empty_like", unpinned):
            super()._submit_async_write(pending)
        self._req_copy_events[pending.req_id].query = lambda: True
