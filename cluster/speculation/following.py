"""The speculator of a target's further tensor-parallel ranks: they verify what the first one's draft has proposed."""

from typing import Any

import torch

from cluster.speculation import target_seam


class FollowingSpeculator(target_seam.DraftlessSpeculator):
    """Has no draft and asks none. In each round it takes the tokens that the first rank's RemoteSpeculator returns
    there, those that stand for no proposal included: so all ranks lose and regain their draft in the same step."""

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return torch.nn.Module()

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """The first rank's block tables travel; these are the same."""

    def propose(
        self, input_batch: Any, *arguments: Any, dummy_run: bool = False, is_profile: bool = False, **keywords: Any
    ) -> torch.Tensor:
        """The first rank's drafts [B, K], in a buffer of this object's."""
        drafts = self.draft_tokens[: input_batch.num_reqs]
        if dummy_run or is_profile:
            return drafts.zero_()
        return self.of_first_rank(drafts)
