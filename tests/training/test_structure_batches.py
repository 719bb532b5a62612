"""Structure ids stay with their tokens through Megatron's shuffling, cutting and our packing."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppmega.data import prepare as data
from cppmega.data import tokenizers
from cppmega.data.structure import LEVELS, Kind
from cppmega.errors import CppmegaError
from cppmega.recipe import Structure
from cppmega.training.batch import DataTokens, dataset_provider, next_batch
from tests.preflight.contexts import SLICE
from tests.support.tokenizers import byte_level, codes_of, saved

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]

LENGTH = 64
RECIPE = SLICE.with_(
    structure=Structure(),
    seq_length=LENGTH,
    dsa_indexer_topk=32,
    packed_documents=True,
    document_multiple=1,
)
PYTHON = "def größe_{0}(x{0}):\n    # note {0}\n    return [call{0}(y) for y in x{0} if y > {0}]\n"
C = "struct s{0} {{ int a{0}; }};\n\nint f{0}(int n{0}) {{ return n{0} ? g{0}(n{0}) : {0}; }}\n"
PLAIN = "Only the {0}. of some texts, which is no code ({0}).\n"

Codes = list[tuple[tuple[int, ...], list[int]]]
"""Tokens of every document, its end among them, and their codes."""


class Prepared:
    """Two datasets with structure ids, and the codes of their documents from the sources."""

    def __init__(self, folder: Path) -> None:
        texts = {
            "one": [(f"{n}.py", PYTHON.format(n) * (1 + n % 7)) for n in range(12)],
            "two": [(f"{n}.c", C.format(n)) for n in range(9)]
            + [(f"{n}.txt", PLAIN.format(n)) for n in range(9)],
        }
        everything = [text for files in texts.values() for _, text in files]
        tokenizer = tokenizers.load(str(saved(folder / "bpe", byte_level(everything[::3], 330))))
        self.end, self.documents, self.folder = tokenizer.eod, [], folder
        languages = {".py": "python", ".c": "c", ".txt": None}
        for name, files in texts.items():
            for file, text in files:
                path = folder / name / file
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
                (ids,) = tokenizer.encode([text.encode()])
                codes = codes_of(text.encode(), languages[path.suffix], tokenizer, ids)
                self.documents.append(((*ids, tokenizer.eod), [*codes, 0]))
            data.prepare(folder / f"{name}.data", [folder / name], tokenizer, structure=True)

    def dataset(self, recipe: Any, samples: int, names: Sequence[str] = ("one", "two")) -> Any:
        """Megatron's training set, as the trainer builds it; without names, of mock data."""
        prefixes = [str(self.folder / f"{name}.data") for name in names]
        tokens = DataTokens(recipe.vocab_size, self.end, "abc")
        cache = str(self.folder / f"cache{recipe.structure is not None}")
        return dataset_provider(recipe, tokens, prefixes, cache)([samples, 0, 0])[0]

    def pieces(self, tokens: Sequence[int]) -> Iterator[range]:
        """Where the documents of a sample are in it."""
        ends = [place + 1 for place, token in enumerate(tokens) if token == self.end]
        borders = sorted({0, *ends, len(tokens)})
        return (range(a, b) for a, b in pairwise(borders))

    def found(self, tokens: tuple[int, ...]) -> list[tuple[int, list[int]]]:
        """Every place at which tokens are in a document, and their codes there."""
        return [
            (at, codes[at : at + len(tokens)])
            for own, codes in self.documents
            for at in range(len(own) - len(tokens) + 1)
            if own[at : at + len(tokens)] == tokens
        ]


@pytest.fixture(scope="module", name="prepared")
def two_datasets(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr("gc.collect", lambda *generation: 0)
        return Prepared(tmp_path_factory.mktemp("structure"))


def codes(kinds: Any, depths: Any) -> list[int]:
    """Both ids as one list of codes."""
    assert kinds.dtype == depths.dtype == torch.int64
    return (kinds * LEVELS + depths).tolist()


@pytest.mark.parametrize(
    ("names", "kinds"),
    [(("one", "two"), set(Kind) - {Kind.DIRECTIVE}), (("two",), {Kind.NONE, Kind.TYPE})],
)
def test_samples_of_megatrons_dataset(
    prepared: Prepared, names: Sequence[str], kinds: set[Kind]
) -> None:
    """Every token has the ids that its source gives it: in a blend, and over several epochs."""
    dataset = prepared.dataset(RECIPE, 90, names)
    seen: set[int] = set()
    begun_elsewhere = several = 0
    for sample in (dataset[which] for which in range(len(dataset))):
        tokens = sample["tokens"].tolist()
        own = codes(sample["structure_kinds"], sample["structure_depths"])
        pieces = list(prepared.pieces(tokens))
        several += len(pieces) > 1
        for piece in pieces:
            places = prepared.found(tuple(tokens[piece.start : piece.stop]))
            assert own[piece.start : piece.stop] in [one for _, one in places], tokens
            begun_elsewhere += piece.start == 0 and all(at for at, _ in places)
        seen.update(own)
    assert begun_elsewhere > 10 and several > 10  # documents are split, and share a sample
    assert {code // LEVELS for code in seen} >= kinds
    assert len(dataset) >= (25 if len(names) > 1 else 90)


def test_a_sample_has_no_ids_of_other_documents(prepared: Prepared) -> None:
    """The comparison above tells ids that are shifted by one, or are those of another sample."""
    dataset = prepared.dataset(RECIPE, 90)
    told_shifted = told_other = 0
    for which in range(25):
        tokens = dataset[which]["tokens"].tolist()
        own, other = (
            codes(dataset[n]["structure_kinds"], dataset[n]["structure_depths"])
            for n in (which, which + 1)
        )
        for piece in prepared.pieces(tokens):
            at = slice(piece.start, piece.stop)
            right = [one for _, one in prepared.found(tuple(tokens[at]))]
            told_shifted += [0, *own][at] not in right
            told_other += other[at] not in right
    assert told_shifted > 25 and told_other > 20


def test_a_dataset_is_the_same_in_a_process_that_loads_for_it(prepared: Prepared) -> None:
    dataset = prepared.dataset(RECIPE, 90)
    copied = pickle.loads(pickle.dumps(dataset))
    for which in (0, 7, 19):
        for name in ("tokens", "structure_kinds", "structure_depths"):
            assert torch.equal(copied[which][name], dataset[which][name])


def test_a_recipe_without_structure_gets_none(prepared: Prepared) -> None:
    plain = RECIPE.with_(structure=None)
    with_ids, without = prepared.dataset(RECIPE, 90), prepared.dataset(plain, 90)
    assert "structure_kinds" not in without[0]
    assert torch.equal(with_ids[5]["tokens"], without[5]["tokens"])
    batch = next_batch(plain, batches(with_ids), prepared.end, "cpu")
    assert batch.structure_kinds is None and batch.structure_depths is None


def batches(dataset: Any, size: int = 2) -> Iterator[dict[str, Any]]:
    """Micro-batches of a dataset."""
    return iter(torch.utils.data.DataLoader([dataset[n] for n in range(8)], batch_size=size))


@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_documents_keep_their_ids(prepared: Prepared, multiple: int) -> None:
    recipe = RECIPE.with_(document_multiple=multiple)
    source, padding = batches(prepared.dataset(recipe, 90)), 0
    for _ in range(4):
        batch = next_batch(recipe, source, prepared.end, "cpu")
        assert batch.structure_kinds is not None and batch.structure_depths is not None
        assert batch.structure_kinds.shape == batch.tokens.shape == (1, 2 * LENGTH)
        own = codes(batch.structure_kinds, batch.structure_depths)[0]
        params, tokens = batch.packed_seq_params, batch.tokens[0].tolist()
        real = params.cu_seqlens_q.diff().tolist()
        padded = params.cu_seqlens_q_padded
        padded = params.cu_seqlens_q if padded is None else padded
        for (start, stop), length in zip(pairwise(padded.tolist()), real, strict=True):
            places = prepared.found(tuple(tokens[start : start + length]))
            assert own[start : start + length] in [one for _, one in places]
            assert not any(own[start + length : stop])
            padding += stop - start - length
    assert (padding > 0) == (multiple > 1)


def test_samples_that_are_not_packed(prepared: Prepared) -> None:
    recipe = RECIPE.with_(packed_documents=False)
    source = prepared.dataset(recipe, 90)
    batch = next_batch(recipe, batches(source), prepared.end, "cpu")
    assert batch.structure_kinds is not None and batch.structure_depths is not None
    assert batch.structure_kinds.shape == (2, LENGTH)
    assert torch.equal(batch.structure_kinds[1], source[1]["structure_kinds"])
    assert torch.equal(batch.structure_depths[1], source[1]["structure_depths"])
    # A tensor on the meta device has no values: reading one back, as a host sync does, raises.
    on_device = next_batch(recipe, batches(source), prepared.end, "meta").structure_kinds
    assert on_device is not None and on_device.device.type == "meta"


def test_mock_data_has_made_up_ids(prepared: Prepared) -> None:
    samples = [prepared.dataset(RECIPE, 8, ())[3] for _ in range(2)]
    for name, rows in (("structure_kinds", len(Kind)), ("structure_depths", LEVELS)):
        one, again = (sample[name] for sample in samples)
        assert torch.equal(one, again) and 0 <= int(one.min()) < int(one.max()) < rows
        assert len(one) == LENGTH and len(set(one.tolist())) > rows // 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("structure_kinds", 9), ("structure_kinds", -1), ("structure_depths", 16)],
)
@pytest.mark.parametrize("packed", [True, False])
def test_ids_that_the_embedding_has_no_row_for(
    prepared: Prepared, name: str, value: int, packed: bool
) -> None:
    sample = next(batches(prepared.dataset(RECIPE, 90)))
    sample[name][1, 5] = value
    with pytest.raises(CppmegaError, match="structure-out-of-range") as caught:
        next_batch(RECIPE.with_(packed_documents=packed), iter([sample]), prepared.end, "cpu")
    assert f"{name} of a micro-batch hold {value}" in caught.value.what


def test_a_smaller_embedding_is_told_by_the_same_check(prepared: Prepared) -> None:
    shallow = RECIPE.with_(structure=Structure(levels=2))
    with pytest.raises(CppmegaError, match="structure-out-of-range"):
        next_batch(shallow, batches(prepared.dataset(RECIPE, 90)), prepared.end, "cpu")


def test_mock_codes_of_a_part_are_those_of_the_whole() -> None:
    from cppmega.training.structure_datasets import _MockCodes

    codes_ = _MockCodes(np.array([50, 70]))
    assert codes_.get(1, 20, 30).tolist() == codes_.get(1).tolist()[20:50]
    assert len(codes_.get(1, 60)) == 10 and codes_.get(0).tolist() != codes_.get(1, 0, 50).tolist()
