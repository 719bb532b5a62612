"""Checkpoints are opened without running what they name, and damage is found before a rank."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cppmega.checkpoints import allowed
from cppmega.checkpoints import files as checkpoint_files
from cppmega.checkpoints import shapes as checkpoint_shapes
from cppmega.checkpoints.files import TRACKER
from cppmega.errors import CppmegaError
from cppmega.preflight.messages import CheckpointAnswer, CheckpointOrder
from cppmega.preflight.workers import checkpoint as worker
from tests.support import REPOSITORY, pristine, python

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed", "ignore:TypedStorage")

MEGATRON = """
import io, pathlib, signal, sys, warnings
from argparse import Namespace
from types import SimpleNamespace
import numpy, torch
from cppmega.proof import cpu_shims
cpu_shims.init_distributed()
from megatron.core import dist_checkpointing as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import RerunMode, RerunState
from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
folder = pathlib.Path(sys.argv[1]) / "iter_0000007"
folder.mkdir(parents=True)
args = Namespace(hidden_size=64, num_layers=2, params_dtype=torch.bfloat16, cppmega_recipe="mine",
    attention_backend=AttnBackend.auto, exit_signal=signal.SIGTERM, save=pathlib.Path("/run"),
    model_type=ModelType.encoder_or_decoder, cuda_graph_scope=[CudaGraphScope.attn],
    hybrid_layer_pattern="M*", rerun=(RerunMode.DISABLED, RerunState.NOT_RUNNING_YET))
extra = io.BytesIO()
torch.save({"scale_fwd": torch.ones(3), "recipe": None}, extra)
rng = {"random": (3, (1, 2), None), "numpy": numpy.random.get_state(),
       "torch": torch.get_rng_state(), "tracker": {}}
weight = torch.randn(50, 64)
dist.save({"args": args, "iteration": 7, "opt_param_scheduler": {"max_lr": 1e-3},
    "weight": ShardedTensor.from_rank_offsets("embedding.word_embeddings.weight", weight),
    "rng": ShardedObject("rng_state", [rng], (1,), (0,)),
    "extra": ShardedObject("linear._extra_state", extra, (1,), (0,))}, str(folder))
(folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
"""


@pytest.fixture(scope="module", name="written", params=["0.16.1", "0.19.2"])
def by_megatron(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the first release that is supported, with a common.pt, and by one that has none."""
    load: Path = tmp_path_factory.mktemp(request.param)
    done = python(
        pristine(request.param), f"import sys; sys.argv[1:] = [{str(load)!r}]\n{MEGATRON}"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load


@pytest.fixture(name="load")
def to_break(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "load"))


def opened(load: Path, **how: Any) -> CheckpointAnswer:
    """Read a checkpoint as the preflight does, in this process."""
    complete = checkpoint_files.read(load, **how)
    answer = worker.open_all(CheckpointOrder(archives=[*complete.archives]))
    if answer.problem is not None:
        raise CppmegaError(**answer.problem)
    return answer


def refused(name: str, load: Path, **how: Any) -> str:
    """What the reading of a checkpoint is refused with."""
    with pytest.raises(CppmegaError) as caught:
        opened(load, **how)
    assert caught.value.name == name, caught.value.render()
    return caught.value.what


@pytest.mark.slow
def test_what_megatron_writes(written: Path) -> None:
    complete, found = checkpoint_files.read(written), opened(written)
    assert (complete.step, complete.summed) == ("7", True)
    wanted = {"hidden_size": 64, "cppmega_recipe": "mine", "params_dtype": "bfloat16"}
    assert {name: found.arguments[name] for name in wanted} == wanted
    assert found.arguments["save"].endswith("run")
    assert checkpoint_shapes.facts(complete.shapes)["vocab_size"] == 50


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.2", "0.19.2"])
def test_the_list_names_what_is_there(version: str) -> None:
    """Enumerations and data classes alone: a function would be one that a pickle may call."""
    import ast

    root = pristine(version)
    for module, names in allowed.LISTED.items():
        file = root / (module.replace(".", "/") + ".py")
        if not module.startswith("megatron") or not file.is_file():
            continue
        classes = {n.name: n for n in ast.parse(file.read_text()).body if hasattr(n, "bases")}
        for name in set(names) & set(classes):
            bases = [ast.unparse(base) for base in classes[name].bases]
            decorators = [ast.unparse(one) for one in classes[name].decorator_list]
            data = "dataclass" in decorators or "Enum" in str(bases) or "DelayedScaling" in name
            assert data, (module, name, bases)
        others = {n.name for n in ast.parse(file.read_text()).body if hasattr(n, "args")}
        assert not set(names) & others - {"safe_load_from_bytes"}  # a stand-in, never called


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_what_a_release_calls_safe_is_on_the_list(version: str) -> None:
    """Megatron itself writes these, and its ranks load no others."""
    import ast

    tree = ast.parse((pristine(version) / "megatron/core/safe_globals.py").read_text())
    listed = {name for names in allowed.LISTED.values() for name in names}
    listed |= {name.rpartition(".")[2] for name in allowed.STAND_INS}
    classes = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    pairs = [n for n in ast.walk(tree) if isinstance(n, ast.Tuple) and len(n.elts) == 2]
    encoded = {n.elts[1].value for n in pairs if all(isinstance(e, ast.Constant) for e in n.elts)}
    assert len(encoded) > 20 or version == "0.17.1"
    assert (classes | encoded) - {"annotations", "patch"} <= listed


class Payload:
    """An object whose loading runs something."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def saved(content: Any) -> bytes:
    """As torch.save writes it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def hidden(how: str, payload: Payload) -> Any:
    """Ways to hold an object where a reader may not look."""
    as_bytes = torch.frombuffer(bytearray(pickle.dumps(payload)), dtype=torch.uint8)
    old_style = io.BytesIO()
    torch.save(payload, old_style, _use_new_zipfile_serialization=False)
    return {
        "plain": payload,
        "in the arguments": {"args": Namespace(tokenizer=payload)},
        "as a key": {"optimizer": {(1, payload): 2}},
        "in bytes": io.BytesIO(pickle.dumps(payload)),
        "in bytes with a tail": io.BytesIO(pickle.dumps(payload) + b"tail"),
        "in the second of two": io.BytesIO(pickle.dumps(1) + pickle.dumps(payload)),
        "in bytes of protocol 0": io.BytesIO(pickle.dumps(payload, protocol=0)),
        "after what a stand-in cannot do": io.BytesIO(
            b"\x80\x02ctorch\ndevice\n)\x81K\x01a0" + pickle.dumps(payload)[2:]
        ),
        "in an archive": io.BytesIO(saved(payload)),
        "in an old archive": old_style,
        "in a tensor of bytes": as_bytes,
        "in a nested tensor": io.BytesIO(saved({"state": as_bytes})),
    }[how]


HIDDEN = [
    *("plain", "in the arguments", "as a key", "in bytes", "in bytes with a tail"),
    *("in the second of two", "in bytes of protocol 0", "in an archive", "in an old archive"),
    *("in a tensor of bytes", "in a nested tensor", "after what a stand-in cannot do"),
]


@pytest.mark.parametrize("how", HIDDEN)
def test_nothing_of_it_is_run(tmp_path: Path, how: str) -> None:
    mark = tmp_path / "ran"
    content = hidden(how, Payload(mark))
    refusal = r"posix\.mkdir" if "stand-in" not in how else "a pickle inside it"
    with pytest.raises((allowed.NotListed, allowed.Damaged), match=refusal):
        worker.loaded(io.BytesIO(saved(content)))
    assert not mark.exists()


@pytest.mark.parametrize("where", ["common", "mp_rank", ".metadata", "part"])
def test_a_checkpoint_that_runs_code_is_named(tmp_path: Path, where: str) -> None:
    load, mark = tmp_path / "load", tmp_path / "ran"
    folder = load / "iter_0000003"
    folder.mkdir(parents=True)
    (load / TRACKER).write_text("3\n")
    import torch.distributed.checkpoint as dcp

    tensors = {"embedding.word_embeddings.weight": torch.zeros(5, 4)}
    if where == "mp_rank":
        (folder / "mp_rank_00").mkdir()
        (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(saved(Payload(mark)))
    else:
        more = {"rng": Payload(mark)} if where == "part" else {}
        dcp.save({**tensors, **more}, checkpoint_id=folder, no_dist=True)
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if where == "common":
        (folder / "common.pt").write_bytes(saved({"args": Payload(mark)}))
    if where == ".metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    said = refused("checkpoint-runs-code", load)
    assert "posix.mkdir" in said and str(folder) in said
    assert not mark.exists()


def test_reading_imports_no_torch(written: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from cppmega.checkpoints import files as checkpoint_files\n"
        "assert checkpoint_files.read(Path(sys.argv[1])).shapes\n"
        "print([m for m in ('torch', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(written)], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__0_0.distcp", lambda data: data[:-100], "of its"),
        ("__0_0.distcp", None, "has 0 of its"),
        (".metadata", None, ".metadata is missing"),
        (".metadata", lambda data: data[:-50], ".metadata: "),
        (".metadata", lambda data: b"", ".metadata: "),
        ("metadata.json", None, "metadata.json is missing"),
        ("metadata.json", lambda data: b"{", "metadata.json: "),
        ("metadata.json", lambda data: b"[]", "metadata.json: "),
        (
            ".metadata",
            lambda data: data.replace(b"__0_0.distcp", b"../../passwd"),
            "of '../../passwd'",
        ),
    ],
)
def test_files_that_are_missing_or_cut_off(load: Path, name: str, damage: Any, words: str) -> None:
    path = load / "iter_0000007" / name
    if damage is None:
        path.unlink()
    else:
        assert damage(path.read_bytes()) != path.read_bytes()
        path.write_bytes(damage(path.read_bytes()))
    assert words in refused("checkpoint-broken", load)


def test_folders_that_hold_no_checkpoint(load: Path) -> None:
    folder = load / "iter_0000007"
    for name in (".metadata", "metadata.json"):
        (folder / name).unlink()
    assert ".metadata and metadata.json are missing" in refused("checkpoint-broken", load)
    shutil.rmtree(folder)
    folder.mkdir()
    assert "it is empty" in refused("checkpoint-broken", load)
    folder.rename(load / "iter_0000006")
    assert "iter_0000007 is missing" in refused("checkpoint-broken", load)
    for text in ("seven", "", "-7", "7.0", "9" * 5000, "\u0667", "7\n8", "release"):
        (load / TRACKER).write_text(text)
        refused("checkpoint-broken", load)
    (load / TRACKER).unlink()
    refused("no-checkpoint", load)


def parts_of(load: Path) -> list[tuple[Path, int, int]]:
    """Where the bytes are that a tensor or an object is made of."""
    folder = load / "iter_0000007"
    index = checkpoint_files._index((folder / ".metadata").read_bytes())
    return [(folder / part.file, part.offset, part.length) for part in index.parts]


def test_a_flipped_bit_of_a_tensor(load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file, offset, length), *_ = sorted(parts_of(load), key=lambda part: -part[2])
    data = bytearray(file.read_bytes())
    data[offset + length // 2] ^= 1
    file.write_bytes(data)
    assert "differs from its checksum" in refused("checkpoint-broken", load)
    monkeypatch.setattr(checkpoint_files, "AT_ONCE", 0)
    assert not checkpoint_files.read(load).summed
    assert "differs from its checksum" in refused("checkpoint-broken", load, deep=True)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_a_damaged_byte_never_ends_in_another_error(written: Path, draw: st.DataObject) -> None:
    """Whatever the file: it is refused by name, or what was read is what was written."""
    good = opened(written)
    folder = written / "iter_0000007"
    path = folder / draw.draw(st.sampled_from(sorted(p.name for p in folder.iterdir())))
    whole = path.read_bytes()
    place, change = draw.draw(st.integers(0, len(whole) - 1)), draw.draw(st.integers(1, 255))
    try:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        found = opened(written)
    except CppmegaError as error:
        assert error.name in ("checkpoint-broken", "checkpoint-runs-code"), error.render()
    else:
        if path.name not in (".metadata", "metadata.json"):  # these have no checksum
            assert found.arguments == good.arguments
    finally:
        path.write_bytes(whole)


def archive(**parts: bytes) -> bytes:
    """A zip with these parts, in this order."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, data in parts.items():
            written.writestr(f"archive/{name.replace('__', '.')}", data)
    return file.getvalue()


def shared_lists() -> Any:
    """A value whose text would have 2**60 parts."""
    value: Any = ["x"]
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize("first", ["DATA__PKL", "data__pkl"])
def test_what_torch_loads_is_checked(
    tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch finds parts of an archive whatever the case of their names, the first one first."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark = tmp_path / "ran"
    bad, good = pickle.dumps(Payload(mark), 2), pickle.dumps({"args": 1}, 2)
    other = {"DATA__PKL": "data__pkl", "data__pkl": "DATA__PKL"}[first]
    file = tmp_path / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    (tmp_path / TRACKER).write_text("1")
    file.write_bytes(archive(**{first: bad, other: good, "version": b"3"}))
    refused("checkpoint-runs-code", tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("modelopt_state/common.pt", lambda payload: saved({"modelopt_state": payload})),
        ("modelopt_state/rank_0.pkl", pickle.dumps),
        ("extra/deeper/state.pth", saved),
        ("modelopt_state/.metadata", pickle.dumps),
    ],
)
def test_pickles_in_every_folder_are_opened(load: Path, name: str, data: Any) -> None:
    mark, file = load / "ran", load / "iter_0000007" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(data(Payload(mark)))
    assert "posix.mkdir" in refused("checkpoint-runs-code", load)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "common.pt", "__9_9.distcp"])
def test_a_pipe_is_not_read(load: Path, name: str) -> None:
    path = load / "iter_0000007" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert "not a regular file" in refused("checkpoint-broken", load)


@pytest.mark.parametrize(
    "value",
    [
        shared_lists(),
        {"a": shared_lists()},
        2**2000,
        [[[[1]]]],
        ["x" * 9] * 10**4,
        "\udc80",
        1e999,
    ],
    ids=["lists", "dict", "integer", "depth", "length", "surrogate", "infinity"],
)
def test_arguments_of_any_shape_are_answered(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    (tmp_path / TRACKER).write_text("1")
    content = saved({"args": Namespace(hidden_size=8, other=value), "more": value})
    file.write_bytes(content)
    answer = opened(tmp_path)
    assert answer.arguments["hidden_size"] == 8
    assert len(json.dumps(answer.arguments)) < 10**5


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    load = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    file = load / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    (load / TRACKER).write_text("1")
    file.write_bytes(saved({"args": Namespace(hidden_size=8)}))
    assert opened(load).arguments == {"hidden_size": 8}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_brackets_without_end(load: Path, text: str) -> None:
    (load / "iter_0000007/metadata.json").write_text(text)
    assert "metadata.json" in refused("checkpoint-broken", load)


def test_a_checkpoint_of_one_file_for_each_rank(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000004"
    (tmp_path / TRACKER).write_text("4")
    for rank in ("mp_rank_00", "mp_rank_01"):
        (folder / rank).mkdir(parents=True)
        content = {"args": Namespace(hidden_size=8), "model": {"w": torch.ones(300)}}
        (folder / rank / "model_optim_rng.pt").write_bytes(saved(content))
    found = opened(tmp_path)
    assert found.arguments == {"hidden_size": 8}
    file = folder / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes().replace(b"\x00\x00\x80?" * 4, b"\x00\x00\x80@" * 4))
    assert "mp_rank_01" in refused("checkpoint-broken", tmp_path)


def test_archives_in_archives_without_end() -> None:
    content: Any = io.BytesIO(b"")
    for _ in range(12):
        content = io.BytesIO(saved(content))
    with pytest.raises(allowed.Damaged, match="inside each other"):
        worker.loaded(content)


def test_bytes_that_are_no_pickle() -> None:
    """State of random generators and of FP8 recipes may be any bytes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        noise = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=generator)
        worker.refuse_nested(bytes(noise.tolist()))
        worker.loaded(io.BytesIO(saved({"noise": noise})))


def test_a_format_that_is_not_known_says_nothing(load: Path) -> None:
    (load / "iter_0000007" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert not checkpoint_files.read(load).summed
