"""Match names of classes to outputs, and refuse what two trainers would match in two ways."""

import re

import pytest
from timm.data.readers.reader_image_folder import find_images_and_targets

from tresnet.data.classes import name_numbers, output_order, read_names
from tresnet.errors import ConfigError, DataError

NUMBERED = sorted(map(str, range(11)))


@pytest.mark.parametrize(
    "names",
    [NUMBERED, ["Banana", "apple"], ["a", "a10", "a9"], ["A", "a"], ["x1y2", "x1y10", "x02"]],
    ids=str,
)
def test_two_orders_of_names_are_refused_without_names_of_outputs(names, tmp_path):
    names = sorted(names)
    with pytest.raises(
        ConfigError, match=re.escape(f"{', '.join(names)} (sorted as here")
    ) as error:
        output_order(None, len(names), names)
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").touch()
    _, theirs = find_images_and_targets(str(tmp_path))
    if len({name.lower() for name in names}) == len(names):  # otherwise timm's order is random
        assert f"{', '.join(theirs)} (sorted as in timm)" in str(error.value)


@pytest.mark.parametrize(
    ("trained", "names", "options", "expected"),
    [
        (None, "ab", {}, None),
        (None, ["n01440764", "n02119789"], {}, None),
        (None, sorted(map(str, range(10))), {}, None),
        (None, [*map(str, range(11))], {}, None),
        (None, ["①", "②", "m²"], {}, None),
        ("cab", "abc", {}, [1, 2, 0]),
        ("abc", "abc", {}, None),
        (["be\u0301", "a"], ["a", "b\xe9"], {}, [1, 0]),
        ("cab", "cb", {"subset": True}, [0, 2]),
        (["2", "0", "1"], ["0", "1", "2"], {}, [1, 2, 0]),
        ("cab", ["0", "1", "2"], {}, "the labels of the data are numbers"),
        ("cab", "ab", {}, "have 3 classes, the data 2"),
        ("cab", "abx", {"subset": True}, "but the data also have x"),
    ],
    ids=str,
)
def test_labels_are_matched_by_name(trained, names, options, expected):
    outputs = (trained and list(trained)), len(trained or names)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            output_order(*outputs, list(names), **options)
    else:
        assert output_order(*outputs, list(names), **options) == expected


@pytest.mark.parametrize(
    ("trained", "names", "expected"),
    [
        ("cab", ["2", "0", "1"], ["b", "c", "a"]),
        ("cab", ["2", "0"], ["b", "c"]),
        ("cab", ["0", "1", "3"], ["0", "1", "3"]),
        ("cab", ["0", "1", "01"], ["0", "1", "01"]),
        ("cab", ["a", "1"], ["a", "1"]),
        ("210", ["0", "1"], ["0", "1"]),
        (["1", "2", "other"], ["1", "2"], ["1", "2"]),
        ("", ["0", "1"], ["0", "1"]),
    ],
)
def test_numbers_are_those_of_outputs_that_have_names(trained, names, expected):
    assert name_numbers(list(trained), names) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbfred car\r\n\nblue\n", ["red car", "blue"]),
        ("cafe\u0301\n".encode(), ["caf\xe9"]),
        (b"a\nb\na\n", "every class once, got a twice"),
        (b"\n", "got no name"),
        (b"\xe9", "cannot read the classes"),
    ],
)
def test_a_file_of_names_has_one_in_each_line(tmp_path, content, expected):
    (tmp_path / "names.txt").write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            read_names(tmp_path / "names.txt")
    else:
        assert read_names(tmp_path / "names.txt") == expected
