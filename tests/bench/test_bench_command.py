"""`flowrl bench claims`: the list, errors in one line, and a page without runs."""

from flowrl_bench.catalogue import CLAIMS

from flowrl.cli.main import main


def test_list(capsys):
    assert main(["bench", "claims", "--list"]) == 0
    output = capsys.readouterr().out
    assert all(f"{key}: " in output for key in CLAIMS)


def test_errors_are_one_line(capsys, tmp_path):
    assert main(["bench", "claims", "--only", "nothing"]) == 2
    assert "only = 'nothing' is not allowed" in capsys.readouterr().err
    assert main(["bench", "rule", "nothing", "--out", str(tmp_path)]) == 2
    assert "unknown credit rule 'nothing'" in capsys.readouterr().err
    assert main(["bench", "microscope", "--world", "nowhere"]) == 2
    assert "world = 'nowhere' is not allowed" in capsys.readouterr().err


def test_judge_without_runs_writes_an_empty_page(tmp_path, capsys):
    out = ["--out", str(tmp_path / "none.jsonl"), "--page", str(tmp_path / "page")]
    assert main(["bench", "claims", "--judge", *out]) == 2
    assert "a results file, with --judge" in capsys.readouterr().err
    (tmp_path / "none.jsonl").touch()
    assert main(["bench", "claims", "--judge", *out]) == 0
    assert "runs to be made" in capsys.readouterr().out
    assert "No run has finished yet" in (tmp_path / "page" / "claims.md").read_text()
