"""Layers know whether they share keys while their decoder is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cppmega.features.dsa import layer_kinds as kinds


def test_layers_know_their_kind_while_their_decoder_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(hetereogenous_dist_checkpoint=False)
    with kinds.decoder(config, [2, 4], [2, 4]):
        assert kinds.kind(2) is None
    assert not config.hetereogenous_dist_checkpoint
    monkeypatch.setenv("CPPMEGA_DSA_INDEX_PATTERN", "FS")
    with kinds.decoder(config, [2, 4], [2, 4]):
        assert (kinds.kind(2), kinds.kind(4)) == ((True, 2), (True, 2))
    assert config.hetereogenous_dist_checkpoint
    assert kinds.kind(1) == (False, 1)  # an MTP depth
    with kinds.decoder(config, [], []):
        assert kinds.kind(1) == (False, 1)
    monkeypatch.setenv("CPPMEGA_DSA_INDEX_PATTERN", "FF")
    with kinds.decoder(config, [2, 4], [2, 4]):
        assert kinds.kind(4) == (False, 4)
