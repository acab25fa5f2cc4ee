import datetime
import json

import pytest

from tresnet.engine import config as configs
from tresnet.engine import rundir
from tresnet.errors import ConfigError

NOW = datetime.datetime(2030, 1, 2, 3, 4, 5)


def test_a_run_is_named_by_model_data_and_date_and_never_takes_anothers_place(tiny, tmp_path):
    config = tiny(name=None, data="some/place/")
    directories = [rundir.create(config, NOW) for _ in range(3)]
    stem = "tresnet_t_place_20300102-030405"
    assert [d.name for d in directories] == [stem, f"{stem}-2", f"{stem}-3"]
    assert configs.load(directories[2] / rundir.CONFIG) == config


def test_a_named_run_that_exists_is_refused_and_left_alone(tiny):
    directory = rundir.create(tiny(epochs=5), NOW)
    before = (directory / rundir.CONFIG).read_bytes()
    with pytest.raises(ConfigError, match=r"--name: the run directory .*run exists, and a run nev"):
        rundir.create(tiny(epochs=6), NOW)
    assert (directory / rundir.CONFIG).read_bytes() == before


@pytest.mark.parametrize("name", ["a/b", "..", "."])
def test_a_name_is_no_path(tiny, name):
    with pytest.raises(ConfigError, match="--name: expected a directory name without a path"):
        rundir.create(tiny(name=name), NOW)


def test_a_place_that_is_no_directory_is_refused(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make a run directory in"):
        rundir.create(tiny(runs=str(tmp_path / "file" / "runs")), NOW)


def test_each_start_of_a_run_leaves_its_environment(tiny):
    directory = rundir.create(tiny(), NOW)
    rundir.add_environment(directory, {"torch": "1"})
    rundir.add_environment(directory, {"torch": "2"})
    records = json.loads((directory / rundir.ENVIRONMENT).read_text())
    assert records == [{"torch": "1"}, {"torch": "2"}]
