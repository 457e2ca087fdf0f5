"""The sizes of a native stream, and what fits them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError, RolloutError
from engine.rollout.requests import check_prompt


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The sizes of a stream."""

    max_num_seqs: int  # sequences decoded at once, e.g. 512
    longest_prompt: int  # in tokens, e.g. 1024
    max_new_tokens: int  # longest completion, in tokens, e.g. 512
    max_model_len: int  # longest prompt plus completion, in tokens, e.g. 2048

    def check(self, n: int) -> None:
        """Raise ConfigError if no request of `n` completions fits."""
        if self.max_num_seqs < n:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} is less than the n={n} completions of a prompt, "
                f"which a stream admits together; raise it to {n} or more"
            )
        if not 1 <= self.longest_prompt < self.max_model_len:
            raise ConfigError(
                f"longest_prompt={self.longest_prompt} must be 1 or more and less than "
                f"max_model_len={self.max_model_len}"
            )

    def check_prompt(self, key: Hashable, prompt_ids: Sequence[int], vocab_size: int) -> int:
        """Return the longest completion of the prompt, in tokens, or raise RolloutError."""
        name = f"the prompt of request {key!r}"
        check_prompt(name, prompt_ids, self.max_model_len, vocab_size)
        if len(prompt_ids) > self.longest_prompt:
            raise RolloutError(
                f"{name} has {len(prompt_ids)} tokens and the stream takes "
                f"longest_prompt={self.longest_prompt}; open the stream with a greater one"
            )
        return min(self.max_new_tokens, self.max_model_len - len(prompt_ids))
