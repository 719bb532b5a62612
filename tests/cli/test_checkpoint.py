"""Checkpoints of Hugging Face, in and out by Megatron-Bridge."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guard.bench import Bench
from tests.support import copy, made

# The part of Megatron-Bridge's interface that is used.
BRIDGE = """
class AutoBridge:
    @classmethod
    def import_ckpt(cls, hf_model_id, megatron_path):
        print("import", hf_model_id, megatron_path)

    @classmethod
    def from_hf_pretrained(cls, path):
        print("like", path)
        return cls()

    def export_ckpt(self, megatron_path, hf_path):
        print("export", megatron_path, hf_path)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    made.page(bench.pages)
    return bench


def convert(bench: Bench, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cppmega", "checkpoint", *words],
        env=bench.environment,
        cwd=bench.folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_checkpoints_are_converted_on_the_patched_tree_only(bench: Bench) -> None:
    training = "megatron/bridge/training"
    files = {
        "megatron/bridge/__init__.py": BRIDGE,
        f"{training}/__init__.py": "",
        f"{training}/model_load_save.py": "",
        f"{training}/post_training/__init__.py": "",
        f"{training}/post_training/checkpointing.py": "",
    }
    root, stock = bench.tree(files=files), bench.tree("stock", apply=False, files=files)
    tree, like = ("--megatron", str(root)), ("--like", "org/model")
    done = convert(bench, "import", "org/model", "new", *tree)
    assert done.returncode == 0 and "import org/model new\n" in done.stdout, done
    done = convert(bench, "export", str(bench.pages), "out", *tree, *like)
    assert f"like org/model\nexport {bench.pages} out\n" in done.stdout, done
    done = convert(bench, "import", "org/model", str(bench.pages), *tree)
    assert done.returncode == 1 and "checkpoint-exists" in done.stderr, done
    done = convert(bench, "import", "org/model", "new", "--megatron", str(stock))
    assert done.returncode == 1 and "import org" not in done.stdout, done


def test_without_megatron_bridge_its_import_error_is_stated(bench: Bench) -> None:
    done = convert(bench, "import", "org/model", "new", "--megatron", str(bench.tree()))
    assert done.returncode == 1 and "error: package-missing" in done.stderr
    assert "No module named 'megatron.bridge'" in done.stderr


@pytest.mark.gpu
@pytest.mark.megatron
def test_a_made_small_model_comes_back_bitwise(tmp_path: Path) -> None:
    """With Megatron-Bridge itself, whose import needs Transformer Engine."""
    bridge = pytest.importorskip("megatron.bridge", exc_type=ImportError)
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    given, between, back = (str(tmp_path / name) for name in ("given", "between", "back"))
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        torch_dtype="bfloat16",
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(given)
    words = Tokenizer(models.WordLevel({str(n): n for n in range(128)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(given)
    root = copy("0.19.2", tmp_path / "tree")
    for package in Path(bridge.__file__).parents[1].iterdir():  # Bridge, and what it imports
        if not (root / "megatron" / package.name).exists():
            shutil.copytree(package, root / "megatron" / package.name)
    for line in (
        ["apply"],
        ["checkpoint", "import", given, between],
        ["checkpoint", "export", between, back, "--like", given],
    ):
        command = [sys.executable, "-m", "cppmega", *line, "--megatron", str(root)]
        subprocess.run(command, check=True)
    found = transformers.LlamaForCausalLM.from_pretrained(back, torch_dtype="bfloat16").state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
