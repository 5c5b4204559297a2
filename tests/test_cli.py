"""What all commands share: help, one line of error, exit status, JSON, colours."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import chunkattn
from chunkattn import cli
from chunkattn.commands import bench

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("demo", "plan", "capacity", "aot", "bench", "doctor")
CAPACITY = ["capacity", "--preset=longlive_1", "--memory-gib=141"]


def stopped(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return stop.value.code


# -- help ----------------------------------------------------------------------------------------
def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped(["--help"]) == 0
    out = capsys.readouterr().out
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("    ")]
    assert [name for name in listed if name in COMMANDS] == list(COMMANDS)
    assert stopped(["--version"]) == 0
    assert capsys.readouterr().out == f"{chunkattn.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped([name, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(f"usage: chunkattn {name} [-h]")
    assert "--json" in out
    assert "Exit status: 0 done, " in out
    assert out.endswith("2 cannot run.")
    assert "None" not in out
    assert "False" not in out


# -- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "chunkattn: the following arguments are required: COMMAND"),
        (["paint"], "chunkattn: argument COMMAND: invalid choice: 'paint'"),
        (["doctor", "--colour"], "chunkattn: unrecognized arguments: --colour"),
        (["capacity"], "chunkattn capacity: the following arguments are required: --preset"),
        (["capacity", "--preset=x"], "chunkattn capacity: argument --preset: invalid choice: 'x'"),
        ([*CAPACITY, "--memory-gib=nan"], "argument --memory-gib: must be a number from 0, got "),
        ([*CAPACITY, "--tp=0"], "argument --tp: must be a whole number from 1, got '0'"),
        (["plan", "--preset=longlive_1", "--sink-frames=-1"], "must be a whole number from 0, got"),
        (["plan", "--preset=longlive_1", "--out=x.gif"], "must end in .png or .html, got x.gif"),
        (["aot", "--arch", "sm_75"], "chunkattn aot: argument --arch: invalid choice: 'sm_75'"),
        (["bench", "nothing"], "chunkattn bench: argument NAME: invalid choice: 'nothing'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stopped(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err
    assert captured.err.endswith(" --help\n")


def test_what_does_not_fit_the_model_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*CAPACITY, "--tp=7"]) == 2
    message = "chunkattn capacity: `tp` must divide the 12 K/V heads, got 7\n"
    assert capsys.readouterr() == ("", message)


# -- output --------------------------------------------------------------------------------------
def test_capacity_says_when_no_session_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*CAPACITY, "--memory-gib=1"]) == 1
    assert "longlive_1: 0 session(s) in 1 GiB" in capsys.readouterr().out
    assert cli.main([*CAPACITY, "--memory-gib=1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sessions"] == 0


def piped(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def on_a_terminal(*arguments: str, **env: str) -> str:
    """What is written to the terminal that stdout and stderr are."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"TERM": "xterm-256color"} | env,
        cwd=ROOT,
        stdout=inner,
        stderr=inner,
    )
    os.close(inner)
    written = b""
    with contextlib.suppress(OSError):  # Linux's end of file of a terminal
        while part := os.read(outer, 65536):
            written += part
    os.close(outer)
    assert process.wait(300) == 0, written
    return written.decode()


SPINNER = "import time\nfrom chunkattn.commands import status\nwith status('x'): time.sleep(0.3)"
COLOUR = "\x1b[32m"


def test_colours_are_for_a_terminal_and_not_where_no_color_is_set() -> None:
    pytest.importorskip("rich")
    assert COLOUR in on_a_terminal("-c", SPINNER)
    assert COLOUR not in on_a_terminal("-c", SPINNER, NO_COLOR="1")
    done = piped("-c", SPINNER)
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_pipe_gets_json_and_nothing_else() -> None:
    """Not what vLLM logs when it is imported, either."""
    pytest.importorskip("vllm")
    done = piped("-m", "chunkattn", "plan", "--preset=krea_realtime_14b", "--spans=3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[-1]["visible_chunks"] == list(range(3, 9))
    assert "\x1b" not in done.stderr


# -- bench ---------------------------------------------------------------------------------------
def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "chunkattn", *CAPACITY, "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_bench_lists_what_lies_in_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    names = [path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")]
    assert cli.main(["bench", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert sorted(listed) == sorted(names)
    assert "attention" in listed
    assert all(line.endswith(".") for line in listed.values())
    assert cli.main(["bench"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == sorted(names)


def test_bench_runs_a_script_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its folder first on the path, its own arguments, options too, and its exit status."""
    (tmp_path / "beside_it.py").write_text("WORD = 'beside'\n")
    (tmp_path / "bench_it.py").write_text(
        '"""It."""\nimport sys\nfrom beside_it import WORD\n'
        "print(__name__, WORD, *sys.argv[1:])\n"
        "sys.exit(int(sys.argv[-1]))\n"
    )
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    before = sys.argv, list(sys.path)
    assert stopped(["bench", "it", "--json", "--help", "1"]) == 1
    assert capsys.readouterr().out == "__main__ beside --json --help 1\n"
    assert (sys.argv, sys.path) == before
    assert stopped(["bench", "it", "0"]) == 0
    (tmp_path / "bench_it.py").write_text("import no_such_module")
    capsys.readouterr()
    assert cli.main(["bench", "it"]) == 2
    assert capsys.readouterr() == ("", "chunkattn bench: it needs no_such_module\n")


def test_the_real_scripts_start(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert stopped(["bench", "attention", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: bench_attention.py [-h]")
