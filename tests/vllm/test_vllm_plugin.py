"""What the plugin does to vLLM when it is loaded, and what it refuses: real vLLM, no engine."""

from __future__ import annotations

import logging
import operator

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def registry():
    """vLLM's registry of load formats, put back after each test."""
    from vllm.model_executor import model_loader

    registry = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    before = dict(registry)
    registry.pop("mx", None)
    yield registry
    registry.clear()
    registry.update(before)


@pytest.fixture
def vllm_log(caplog):
    """vLLM's loggers do not propagate to the root, where pytest listens."""
    vllm_logger = logging.getLogger("vllm")
    caplog.set_level(logging.INFO, logger="vllm")
    vllm_logger.addHandler(caplog.handler)
    yield caplog
    vllm_logger.removeHandler(caplog.handler)


def test_registering_twice_registers_once(registry, vllm_log):
    from mx_vllm import register
    from mx_vllm.loader import MxModelLoader

    register()
    register()
    assert registry["mx"] is MxModelLoader
    assert "overwritten" not in vllm_log.text, "vLLM warns when a load format is registered again"


def test_a_name_another_plugin_took_is_left_alone_and_said_so(registry, vllm_log):
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from mx_vllm import register

    registry["mx"] = DummyModelLoader
    register()
    assert registry["mx"] is DummyModelLoader
    assert "already provided by vllm.model_executor.model_loader.dummy_loader.DummyModelLoader" in vllm_log.text


def test_both_entry_points_lead_to_the_plugin():
    from vllm.plugins import load_plugins_by_group
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    from mx_vllm import register
    from mx_vllm.serving_load import MxStatLogger

    assert load_plugins_by_group("vllm.general_plugins")["mx"] is register
    assert MxStatLogger in load_stat_logger_plugin_factories()


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0"])
def test_another_vllm_is_refused_with_the_supported_range(version):
    from mx_common.errors import UnsupportedVersion
    from mx_vllm._version import check_version

    with pytest.raises(UnsupportedVersion, match=rf">=0.32,<0.33, this is vLLM {version}"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1"])
def test_the_versions_of_the_range_are_accepted(version):
    from mx_vllm._version import check_version

    check_version(version)


def test_bytes_that_processing_hides_are_found_and_bytes_it_moves_are_not():
    from mx_vllm.model import _hidden_by_processing

    weight, bias = torch.ones(4, 4), torch.ones(4)
    before = {"w": weight, "b": bias}
    assert _hidden_by_processing(before, before) == ""
    assert "moved 64 bytes of 1 tensors (w" in _hidden_by_processing(before, {"w": torch.empty(0), "b": bias})
    absorbed = {"w": torch.empty(0), "b": bias, "w_uk": torch.ones(2, 4), "w_uv": torch.ones(2, 4)}
    assert _hidden_by_processing(before, absorbed) == ""


@pytest.fixture(scope="module")
def real_config(tmp_path_factory):
    """A real VllmConfig of the small model."""
    from vllm.engine.arg_utils import EngineArgs

    from tests.support.vllm_model import make_model

    full, _, _ = make_model(tmp_path_factory.mktemp("config"))
    return EngineArgs(model=str(full), load_format="mx", skip_tokenizer_init=True, dtype="float32").create_engine_config()


def test_a_plain_model_is_shared_under_an_identity_of_engine_layout_and_versions(real_config):
    import vllm

    from mx_common.load import Settings
    from mx_vllm.job import job_for

    job = job_for(real_config, real_config.model_config, Settings(model_name="shared/name"))
    assert job.refused == ""
    assert (job.identity.model_name, job.identity.backend_framework, job.identity.dtype) == ("shared/name", 1, "float32")
    assert job.identity.backend_framework_version == vllm.__version__
    assert job.identity.torch_version == torch.__version__
    assert (job.rank, job.world, job.accelerator, job.engine) == (0, 1, "cpu", "vllm")


@pytest.mark.parametrize(
    ("where", "name", "value", "says"),
    [
        ("model_config", "quantization", "fp8", "quantisation fp8"),
        ("model_config.model_arch_config", "num_experts", 4, "experts are packed"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
        ("parallel_config", "enable_eplb", True, "expert load balancing"),
    ],
)
def test_models_whose_memory_is_not_the_weights_are_refused(real_config, where, name, value, says):
    import copy

    from mx_common.load import Settings
    from mx_vllm.job import job_for

    config = copy.deepcopy(real_config)
    object.__setattr__(operator.attrgetter(where)(config), name, value)
    assert says in job_for(config, config.model_config, Settings()).refused


def test_the_stat_logger_is_inert_with_another_load_format(real_config, tmp_path, monkeypatch):
    import copy

    from mx_vllm.serving_load import MxStatLogger

    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    config = copy.deepcopy(real_config)
    config.load_config.load_format = "auto"
    logger = MxStatLogger(config)
    logger.log_engine_initialized()
    logger.record(None, None)
    assert not (tmp_path / "run").exists()


def test_the_stat_logger_publishes_queue_over_slots_or_cache_use(real_config, tmp_path, monkeypatch):
    from vllm.v1.metrics.stats import SchedulerStats

    from mx_vllm.ready import serving_channel
    from mx_vllm.serving_load import MxStatLogger

    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    logger = MxStatLogger(real_config)
    channel = serving_channel(real_config)
    logger.log_engine_initialized()
    assert (channel.read().load, channel.read().ready) == (0.0, True)
    slots = real_config.scheduler_config.max_num_seqs
    for stats, load in (
        (SchedulerStats(num_running_reqs=slots // 4, num_waiting_reqs=slots // 4), 0.5),
        (SchedulerStats(num_running_reqs=slots, num_waiting_reqs=slots), 1.0),
        (SchedulerStats(num_running_reqs=0, kv_cache_usage=0.7), 0.7),
        (SchedulerStats(), 0.0),
    ):
        logger.record(stats, None)
        logger._publish()
        assert channel.read().load == pytest.approx(load)
    logger._farewell()
    assert channel.read() is None
