"""The benchmark of a whole recipe: killed, resumed, and what it says of both."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cppmega.recipe import index as recipes_index
from tests.support import pristine

whole = importlib.import_module("benchmarks.whole.training")
report = importlib.import_module("benchmarks.whole.training")

TRAINS = """
import json, sys, time
from pathlib import Path
folder, metrics, stalled = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "stalled"
saved = folder / "latest_checkpointed_iteration.txt"
done = int(saved.read_text()) if folder.exists() else 0
last, evaluates, ends = int(sys.argv[4]), "--held-out" in sys.argv, sys.argv[3] == "ends"
print("cppmega: recipe", flush=True)
with metrics.open("a") as file:
    def say(row):
        file.write(json.dumps(row) + "\\n")
        file.flush()
    say({"start": "nam56r_h200_2gpu_ep2", "overlay": "abc", "mock_data": False})
    for step in range(done + 1, last + 1):
        loss = 11.1 - step / 100 + (0.001 * (step - done) if done else 0)
        losses = {"lm loss": loss, "mtp_1 loss": loss, "mtp_2 loss": loss, "indexer loss": 0.1}
        say({"step": step, "seconds": 0.5, "tokens_per_second": 20000.0, "tflops_per_gpu": 250.0,
             "tflops_per_gpu_by_megatron": 200.0, "peak_gib": 110.0, "loss": loss,
             "grad_norm": 1.0, "losses": losses, "mock_data": False,
             "expert_load": [[0.5, 1.5], [0.25, 2.0]]})
        if step == 20 and not done:
            folder.mkdir()
            print("cppmega: checkpoint of step 20: 76.0 GiB in 60.0 s", flush=True)
        if evaluates and step % 10 == 0:
            say({"evaluated": step, "losses": {k: v + 0.1 for k, v in losses.items()},
                 "tokens": 1000, "seconds": 1.0})
        if ends:
            continue
        if step > 24 and not done and sys.argv[3] != "unsaved":
            time.sleep(0.5)  # an asynchronous save ends later
            saved.write_text("20")
        if step > 24 and (not done or stalled):
            time.sleep(100)
"""


NAME = "nam56r_h200_2gpu_ep2"
STEPS = ("--set", "train_iters=30", "--save-after", "20", "--kill-after", "25")
EVALUATED = ("--held-out", "held", "--set", "eval_interval=10")
RESHARDABLE = ("--set", "dist_ckpt_optim_fully_reshardable=True")
HELD = {"fingerprint": "f01", "documents": 2, "tokens": 1000}


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a run that a script makes up, killed and resumed by the benchmark."""
    return ran(tmp_path, monkeypatch, *EVALUATED)


def invoked(folder: Path, *options: str) -> Result:
    """The command, with everything it writes below a folder."""
    places = ("--site", "site", "--work", "work", "--data", "train", "--out", str(folder / "out"))
    return CliRunner().invoke(whole.main, ["run", *places, *options])


def ran(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
    kind: str = "well",
    fails: bool = False,
) -> dict[str, Any]:
    """The result of such a run, what it printed, and the words of each of its starts."""
    starts: list[tuple[str, ...]] = []

    def start(bench: Any, name: str, tree: Path, *given: str) -> subprocess.Popen[bytes]:
        starts.append(given)
        place = "--save" if "--save" in given else "--load"
        folder = given[given.index(place) + 1]
        last = str(bench.recipe.train_iters)
        if "--exit-interval" in given:
            last = given[given.index("--exit-interval") + 1]
        command = [sys.executable, "-c", TRAINS, folder, str(bench.metrics(name)), kind, last]
        with (bench.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *given], stdout=log, stderr=log, start_new_session=True
            )

    facts = {
        "recipe": NAME,
        "changes": ["train_iters=30"],
        "date": "2026-01-01",
        "gpus": 2,
        "stack": {"gpu": "NVIDIA H200", "torch": "2.11"},
        "data": {"fingerprint": "f00", "documents": 3, "tokens": 4000},
    }
    monkeypatch.setattr(whole.Bench, "start", start)
    monkeypatch.setattr(whole.Bench, "tree", lambda bench, name: tmp_path)
    monkeypatch.setattr(whole.runs, "header", lambda bench: facts)
    monkeypatch.setattr(
        whole.runs.corpus, "open_", lambda prefix: SimpleNamespace(card=None, **HELD)
    )
    monkeypatch.setattr(whole, "check_start", lambda recipe, options, site: None)
    monkeypatch.setattr(whole, "check_gpus", lambda recipe: None)
    monkeypatch.chdir(tmp_path)
    done = invoked(tmp_path, *STEPS, *options)
    assert done.exit_code == int(fails), done.output
    file = tmp_path / "out" / f"{NAME}.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return {**found, "file": file, "starts": starts, "output": done.output}


def test_lost_steps_are_compared_with_their_repetition_and_counted_once(
    result: dict[str, Any],
) -> None:
    run, resume = result["runs"]["overlay"], result["resume"]
    assert run["steps"] == 30 and [row[0] for row in run["curve"]] == list(range(1, 31))
    assert resume["killed_after_step"] == 25 and resume["repeated_steps"] == [21, 25]
    assert resume["largest_difference"] == pytest.approx(0.005)
    assert resume["first_difference"] == pytest.approx(0.001)
    assert run["losses"]["lm loss"][20] == pytest.approx(11.1 - 0.21 + 0.001)
    assert [row[0] for row in result["held_out_losses"]] == [10, 20, 30]
    assert result["saves"] == ["checkpoint of step 20: 76.0 GiB in 60.0 s"]
    assert len(result["seconds_to_first_step"]) == 2


def test_the_page_has_speed_losses_balance_and_kill(result: dict[str, Any]) -> None:
    page = report.page(result)
    assert "| tokens/s per GPU | 10000 |" in page
    assert "lm loss 11.090, mtp_1 loss 11.090, mtp_2 loss 11.090; random weights" in page
    assert "expected to have 11.910 (ln V = 11.090), from which the farthest is 6.9%" in page
    assert "0.25 to 2.00, the most of the median layer 2.00" in page
    assert "the losses differ by at most 5.00e-03, in the first of them by 1.00e-03." in page
    assert "after step 25" in page and "checkpoint of step 20" in page
    assert "| 20 | 11.0000 | 11.0000 | 11.0000 | 1,000 | 1.0 |" in page


OTHERS = {"nam56r_h200_1gpu": 1, "nam56r_full_h200_2gpu_pp2": 2}
RELOADS = (*(word for name in OTHERS for word in ("--reload", name)), "--reload-steps", "4")


def test_other_recipes_train_the_steps_after_the_checkpoint_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran(tmp_path, monkeypatch, *EVALUATED, *RESHARDABLE, *RELOADS)
    page = report.page(found)
    assert {again["recipe"]: again["gpus"] for again in found["reloads"]} == OTHERS
    for again in found["reloads"]:
        assert again["from_step"] == 20
        assert [step for step, _, _ in again["losses"]] == [21, 22, 23, 24]
        assert again["largest_difference"] == pytest.approx(0.0)
        assert len(again["seconds"]) == 4 and again["peak_gib"] > 0
        assert f"{again['seconds'][-1]:.2f} s, with at most {again['peak_gib']:.1f} GiB" in page
        assert f"`{again['recipe']}`, on {again['gpus']} GPU" in page
    assert [step for step, *_ in found["held_out_losses"]] == [10, 20, 30]
    killed, *later = found["starts"]
    assert "--save" in killed and len(later) == 3
    assert not any("--save" in one for one in later)  # no later checkpoint takes its place
    with pytest.raises(click.ClickException, match="began at 3, not after step 20"):
        report.repeated([{"step": 3, "loss": 1.0}], [], 20)


def test_a_recipe_that_cannot_load_it_does_not_keep_the_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = whole.reloaded

    def loading(again: Any, *rest: Any) -> Any:
        if again.recipe.gpus == 1:
            raise MemoryError("reloaded")
        return load(again, *rest)

    monkeypatch.setattr(whole, "reloaded", loading)
    found = ran(tmp_path, monkeypatch, *EVALUATED, *RESHARDABLE, *RELOADS, fails=True)
    assert [again["recipe"] for again in found["reloads"]] == ["nam56r_full_h200_2gpu_pp2"]
    assert "nam56r_h200_1gpu: reloaded" in found["output"]


@pytest.mark.slow
def test_what_a_time_limit_leaves_is_a_result_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "room_for_another", lambda folder: False)
    found = ran(tmp_path, monkeypatch, *EVALUATED, "--timeout", "10", kind="stalled")
    assert found["runs"]["overlay"]["steps"] == 25
    page = report.page(found)
    assert "It was stopped after step 25 of 30: overlay ran for more than 10 s." in page
    assert "The resumed part saved nothing" in page


def test_a_resumed_part_that_shall_save_nothing_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran(tmp_path, monkeypatch, "--save-once")
    killed, resumed = found["starts"]
    assert "--save" in killed and "--save" not in resumed and "--load" in resumed
    assert "saved nothing: it was started with `--save-once`" in report.page(found)


@pytest.mark.slow
def test_a_run_that_stands_still_is_stopped_early_and_its_steps_are_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole.Bench, "quiet", 3.0)
    found = ran(tmp_path, monkeypatch, "--timeout", "60", kind="stalled", fails=True)
    assert "overlay stood still for 3 s" in found["output"]
    assert found["runs"]["overlay"]["steps"] == 25
    assert "It was stopped after step 25 of 30: overlay stood still for 3 s." in report.page(found)


@pytest.mark.slow
def test_the_curves_are_drawn(result: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert report.draw(result["file"]).stat().st_size > 10_000


def test_a_run_that_began_anew_is_no_result() -> None:
    row = {"loss": 1.0, "grad_norm": 1.0}
    killed = [{"step": step, **row} for step in range(1, 26)]
    with pytest.raises(click.ClickException, match="resumed at 1"):
        report.measured(killed, killed, 20)
    with pytest.raises(click.ClickException, match="a step is missing"):
        report.measured(killed[3:], [{"step": 21, **row}], 20)
    with pytest.raises(click.ClickException, match="took no step"):
        report.measured(killed, [], 20)


def test_a_recipe_without_evaluation_is_given_no_held_out_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran(tmp_path, monkeypatch, "--held-out", "held")
    assert found["held_out"] is None and found["held_out_losses"] == []
    assert all("--held-out" not in words for words in found["starts"])
    page = report.page(found)
    assert "3 documents, 4,000 tokens.\n" in page and "Nothing was evaluated." in page


@pytest.mark.slow
def test_the_curves_of_a_run_without_evaluation_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    assert report.draw(ran(tmp_path, monkeypatch)["file"]).stat().st_size > 10_000


def test_only_the_killed_start_is_profiled_and_only_where_the_profile_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, resumed = ran(tmp_path, monkeypatch, "--profile-after", "12")["starts"]
    assert "--profile" in killed and "--profile" not in resumed
    recipe = recipes_index.load(NAME).with_(train_iters=120)
    for kill_after, expected in ((41, None), (42, 40), (60, 40)):
        assert whole.checked(recipe, 40, kill_after, None, 0) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "said"),
    [("ends", "ended before it could be killed"), ("unsaved", "checkpoint was not complete")],
)
def test_a_run_that_cannot_be_killed_after_its_save_says_so(
    first: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=said):
        ran(tmp_path, monkeypatch, "--timeout", "5", kind=first)


def test_the_metrics_of_an_earlier_call_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "out" / "overlay.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 500, "loss": 1.0}\n')
    ran(tmp_path, monkeypatch)
    assert '"step": 30' in metrics.read_text() and '"step": 500' not in metrics.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--save-after", "25"), "no checkpoint to resume from"),
        (("--save-after", "12"), "resume from another checkpoint"),
        (("--kill-after", "30"), "would end before it is killed"),
        (("--profile-after", "24"), "--profile-after 24 must be at most 23"),
        (("--reload", "nam56r_h200_1gpu", "--reload-steps", "11"), "no losses to compare"),
        (("--reload", "nam56r_h200_1gpu"), "cannot load its checkpoint"),
        (("--reload", "nam56r_h200_1gpus"), "Did you mean nam56r_h200_1gpu?"),
        (("--recipe", "own.py"), "only shipped recipes"),
        (("--set", "train_iters=10", "--save-after", "8", "--kill-after", "9"), "10 warm up"),
        (
            (
                *("--set", "train_iters=13", "--save-after", "11", "--kill-after", "12"),
                *("--profile-after", "10"),
            ),
            "the profile disturbs 3",
        ),
        (("--set", "eval_interval=10"), "--held-out is not given"),
        (EVALUATED, "train.idx and train.bin missing"),
        ((), "train.idx and train.bin missing"),
        (("--recipe", "smoke_cpu"), "recipe-is-a-loop"),
    ],
)
def test_what_can_only_fail_is_refused_before_a_process_is_started(
    options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*words: Any, **given: Any) -> None:
        raise AssertionError(f"started: {words}")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.chdir(tmp_path)
    done = invoked(tmp_path, *STEPS, "--site", str(pristine("0.19.2")), *options)
    assert done.exit_code in (1, 2) and isinstance(done.exception, SystemExit), done.output
    assert said in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_for_more_gpus_than_the_host_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    whole.check_gpus(recipes_index.load(NAME))
    with pytest.raises(click.ClickException, match="takes 4 GPUs, and this host has 2"):
        whole.check_gpus(recipes_index.load("nam56r_h200_4gpu_ep4"))


def test_a_checkpoint_by_bucket_is_loaded_with_other_replicas_only() -> None:
    two, one = (recipes_index.load(name) for name in (NAME, "nam56r_h200_1gpu"))
    whole.check_layouts(one, one.with_(gpus=2, overlap_grad_reduce=True))
    whole.check_layouts(two.with_(dist_ckpt_optim_fully_reshardable=True), one)
    with pytest.raises(click.UsageError, match="another layout"):
        whole.check_layouts(two, one)


def test_the_other_recipe_trains_the_same_steps_and_evaluates_nothing(tmp_path: Path) -> None:
    changes = ("train_iters=30", "global_batch_size=32", *RESHARDABLE[1:])
    recipe = whole.shipped(NAME, changes)
    bench = whole.Bench(recipe, changes, tmp_path, tmp_path, tmp_path, tmp_path, 1.0)
    other = recipes_index.load("nam56r_small_cut")
    assert other.eval_interval and other.train_iters != 30
    again = whole.reloading(bench, other.name)
    assert again.recipe.eval_interval == 0
    assert (again.recipe.train_iters, again.recipe.global_batch_size) == (30, 32)
    assert whole.shipped(other.name, again.changes) == again.recipe  # as the ranks change it
