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


def test_another_vllm_is_refused_before_anything_loads(monkeypatch):
    import vllm
    from vllm.config.load import LoadConfig

    from mx_common.errors import UnsupportedVersion
    from mx_vllm.loader import MxModelLoader

    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(UnsupportedVersion, match=r">=0.32,<0.33, this is vLLM 0.33.0.*without --load-format mx"):
        MxModelLoader(LoadConfig(load_format="mx"))


def test_the_installed_vllm_is_within_the_range():
    import vllm

    from mx_vllm import ENGINE

    ENGINE.check(vllm.__version__)
    assert ENGINE.supports(ENGINE.installed())


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
    from mx_vllm.loader import job_for

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
    from mx_vllm.loader import job_for

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

    from mx_vllm.serving_load import MxStatLogger, serving_channel

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
        logger._report.publish()
        assert channel.read().load == pytest.approx(load)
    logger._report._farewell()
    assert channel.read() is None
