"""Published files of P-EAGLE heads: EAGLE-3's, with `mask_hidden` [1, 1, taps * hidden]."""

from __future__ import annotations

from dataclasses import replace

from outrider.draft.eagle3 import layouts

MASKS = ("mask_token_id", "ptd_token_id")  # keys of configs: of speculators, of vLLM's first files
FORMAT = replace(layouts.FORMAT, kinds="peagle|PEagle.*")
