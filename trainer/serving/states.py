"""vLLM writes its hidden states, on a CPU too, for ``gdistill-extract --engine --teacher``.

vLLM's own connector copies them through pinned memory, which a CPU has not: its engine ends at the
first request. On a GPU this class does what its parent does.

``vllm serve MODEL --speculative-config '{"method": "extract_hidden_states",
"num_speculative_tokens": 1, "draft_model_config": {"hf_config":
{"eagle_aux_hidden_state_layer_ids": [NUMBER OF LAYERS]}}}' --kv-transfer-config '{"kv_connector":
"StatesConnector", "kv_connector_module_path": "trainer.serving.states", "kv_role": "kv_producer",
"kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}'``: FOLDER gets a file a request,
which the reader deletes; ``/dev/shm/NAME`` is memory.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class StatesConnector(stock.ExampleHiddenStatesConnector):
    """One safetensors file a request: ``hidden_states`` [L, 1, D], ``token_ids`` [L]."""

    def _submit_async_write(self, pending: Any) -> None:
        cache = self._kv_cache  # [blocks, states, block size, D]
        if cache.is_cuda or not self._is_tp_rank_zero:
            return super()._submit_async_write(pending)
        places = torch.arange(len(pending.token_ids))
        blocks = torch.tensor(pending.block_ids)[places // self._block_size]
        states = cache[blocks, :, places % self._block_size].contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        copied = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
        lock = self._lock_fds.pop(pending.req_id, None)
        written = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = written
        written.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))
        return None
