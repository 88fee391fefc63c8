"""The command line: what is allowed, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiring.errors import ArgumentError, DeviceError
from mpiring.train.options import check_writable, parse
from mpiring.train.place import check_cuda


def test_defaults() -> None:
    options = parse([])
    assert options.hidden == (512, 512)
    assert (options.optimizer, options.lr, options.overlap) == ("sgd", 0.05, True)
    assert parse(["--optimizer", "adam"]).lr == 0.001
    assert parse(["--optimizer", "adam", "--lr", "0"]).lr == 0


def test_what_is_given() -> None:
    options = parse(["--hidden", "3,4", "--no-overlap", "--bucket-mb", "0.5", "--lr", "1e-3"])
    assert options.hidden == (3, 4)
    assert (options.overlap, options.bucket_mb, options.lr) == (False, 0.5, 0.001)
    assert parse(["--hidden", "none"]).hidden == ()


FROM_0 = "allowed are finite numbers from 0"
FROM_1 = "allowed are whole numbers from 1"


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        *(("--hidden", value, FROM_1) for value in ("", ",", "0", "5,,5", "-3", "x", "1.5")),
        *(("--epochs", value, FROM_1) for value in ("0", "-1", "1.5", "nan", "")),
        *(("--batch-size", value, FROM_1) for value in ("0", "-64", "many")),
        *(("--accumulate", value, FROM_1) for value in ("0", "inf")),
        *(("--seed", value, "allowed are whole numbers from 0") for value in ("-1", "0x10")),
        *(("--lr", value, FROM_0) for value in ("inf", "nan", "-0.1", "1e999", "fast", "")),
        *(("--momentum", value, f"{FROM_0}, below 1") for value in ("1", "nan", "-0.5")),
        *(("--weight-decay", value, FROM_0) for value in ("-1", "inf")),
        *(("--bucket-mb", value, FROM_0) for value in ("-1", "nan", "inf")),
        ("--first-bucket-mb", "-1", FROM_0),
        ("--dtype", "int8", "float16"),
        ("--optimizer", "lamb", "adam"),
        ("--device", "tpu", "cuda"),
        ("--progress", "magic", "thread"),
    ],
)
def test_a_value_that_is_not_allowed(option: str, value: str, allowed: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse([f"{option}={value}"])
    message = str(caught.value)
    assert option in message and repr(value) in message and allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("arguments", [["--epoch-count", "3"], ["3"], ["--json"], ["--overlap=1"]])
def test_what_is_no_option(arguments: list[str]) -> None:
    with pytest.raises(ArgumentError):
        parse(arguments)


def test_help_is_printed_by_rank_0_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for rank in "01":
        monkeypatch.setenv("PMI_RANK", rank)
        monkeypatch.setenv("PMI_SIZE", "2")
        with pytest.raises(SystemExit) as ended:
            parse(["--help"])
        assert ended.value.code == 0
        texts.append(capsys.readouterr().out)
    assert "--hidden N,N,..." in texts[0] and "(default: 512,512)" in texts[0]
    assert max(map(len, texts[0].splitlines())) <= 80
    assert texts[1] == ""


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable("json", None)
    check_writable("json", str(tmp_path / "new.json"))
    check_writable("json", "/dev/null")
    (tmp_path / "file").write_text("")
    for path, why in [
        (tmp_path / "no" / "x.json", "there is no folder .*no"),
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "x.json", "there is no folder .*file"),
        ("", "it is empty"),
    ]:
        with pytest.raises(ArgumentError, match=f"--json: '.*' given, but {why}; allowed"):
            check_writable("json", str(path))


def test_cuda_is_refused_in_words() -> None:
    with pytest.raises(DeviceError, match=r"cuda|CUDA"):
        check_cuda()
