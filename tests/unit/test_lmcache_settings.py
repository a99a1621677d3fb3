"""psrl.lmcache.*: what is refused, what LMCache and vLLM are told, under which name entries are filed."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from psrl.config.coordination import KVTransferConfig
from psrl.config.errors import ConfigError
from psrl.config.lmcache import LMCacheConfig
from psrl.config.lmcache_checks import LONGEST_WAIT_MS, check_lmcache
from psrl.config.routing_checks import check_routing
from psrl.config.schema import Config
from psrl.role import Role
from psrl.rollout.cache_identity import TAG, cache_identity
from psrl.rollout.lmcache_instance import environment, instance_lmcache, with_transfers
from psrl.rollout.lmcache_messages import LONGEST_LEASE_S
from psrl.rollout.lmcache_settings import PORTS_PER_RANK, LMCacheSettings, lmcache_settings, peer_address
from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir

pytestmark = pytest.mark.unit

PORT_LISTS = ("lmcache_worker_ports", "p2p_init_ports", "p2p_lookup_ports")
P2P = {"enable_p2p": True, "controller_host": "node7"}


def config(engine: str = "vllm", transfer: dict | None = None, **lmcache) -> Config:
    made = Config()
    made.gen_actor_rollout_ref.rollout.name = engine
    for name, value in ({"enable": True} | lmcache).items():
        assert hasattr(made.psrl.lmcache, name)
        setattr(made.psrl.lmcache, name, value)
    for name, value in (transfer or {}).items():
        setattr(made.psrl.rollout_coordination.routing_strategy.kv_transfer, name, value)
    return made


TCP = {"p2p_transfer_channel": "tcp"}


@pytest.mark.parametrize(
    ("lmcache", "ps_mode", "route", "accepted"),
    [
        (P2P | TCP, "auto", "auto", False),
        (P2P | TCP, "nixl", "auto", False),
        (P2P | TCP, "nixl", "vram", False),
        (P2P | TCP, "auto", "nixl", False),
        (P2P | TCP, "auto", "shm", True),
        (P2P | TCP, "nixl", "shm", True),
        (P2P | TCP, "filesystem", "auto", True),
        (TCP, "auto", "auto", True),  # nothing moves: UCX_TLS is not set
        (P2P, "auto", "auto", True),
        (P2P, "nixl", "vram", True),
    ],
)
@pytest.mark.parametrize("transfer", [{}, {"enable": True}, {"enable": True, "transfer_mode": "sync"}])
def test_tcp_alone_is_refused_where_weights_travel_through_ucx(
    lmcache: dict, ps_mode: str, route: str, accepted: bool, transfer: dict
) -> None:
    asked = config(transfer=transfer if "enable_p2p" in lmcache else {}, **lmcache)
    asked.psrl.ps_mode, asked.psrl.weights.route = ps_mode, route
    if accepted:
        assert check_lmcache(asked, installed=True) == []
        return
    with pytest.raises(ConfigError) as caught:
        check_lmcache(asked, installed=True)
    message = str(caught.value)
    assert message.count(". ") == 0 and message.endswith(".")
    for word in (
        "psrl.lmcache.p2p_transfer_channel=tcp",
        f"psrl.ps_mode={ps_mode}",
        f"psrl.weights.route={route}",
        "use p2p_transfer_channel=nixl, or psrl.ps_mode=filesystem, or psrl.weights.route=shm",
    ):
        assert word in message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": "torch"}, r"enable=True needs gen_actor_rollout_ref\.rollout\.name=vllm but it is torch"),
        ({"multi_version_kv": False}, "multi_version_kv=False with .*clear_on_weight_update=False would serve"),
        (
            {"multi_version_kv": False, "clear_on_weight_update": True, "backend": "disk", "disk_path": "/s"},
            "multi_version_kv=False with psrl.lmcache.backend=disk is refused",
        ),
        ({"backend": "gpu"}, r"backend=gpu is refused: allowed is cpu \| disk"),
        ({"backend": "disk"}, "backend=disk needs psrl.lmcache.disk_path but it is null"),
        ({"disk_path": "/scratch"}, "disk_path=/scratch has no meaning with psrl.lmcache.backend=cpu"),
        ({"max_disk_size_gb": 5.0}, "max_disk_size_gb=5.0 has no meaning"),
        ({"backend": "disk", "disk_path": "/s", "max_disk_size_gb": 0.0}, "max_disk_size_gb=0 .*greater than 0"),
        ({"offload_size_gb": 0.0}, "offload_size_gb=0 is refused: it must be greater than 0"),
        ({"chunk_size": 0}, "chunk_size=0 is refused: it must be at least 1"),
        ({"reserve_local_cpu_size": -1.0}, "reserve_local_cpu_size=-1 is refused"),
        ({"gpu_pin_block_budget": 8}, "gpu_pin_block_budget=8 is not in this version of psrl"),
        ({"cache_policy": "LFU"}, r"cache_policy=LFU is refused: allowed is LRU \| FIFO"),
        ({"p2p_transfer_channel": "udp"}, r"p2p_transfer_channel=udp is refused: allowed is nixl \| tcp"),
        ({"enable": False, **P2P}, "enable_p2p=True shares an offload tier"),
        ({"enable_p2p": True}, "enable_p2p=True needs psrl.lmcache.controller_host"),
        ({"controller_reply_port": 8300, **P2P}, "controller_reply_port are both 8300"),
        (
            {"multi_version_kv": False, "clear_on_weight_update": True, **P2P},
            "needs multi_version_kv=True and clear_on_weight_update=False, not False and True",
        ),
        ({"clear_on_weight_update": True, **P2P}, "not True and True"),
        ({"transfer": {"enable": True}}, r"kv_transfer\.enable=True moves entries .*enable_p2p=False"),
        ({"transfer": {"enable": True, "transfer_mode": "sync"}}, r"kv_transfer\.enable=True moves entries .*enable_p2p=False"),
        ({"transfer": {"enable": True}, "enable_p2p": True}, "controller_host but .*or use .*transfer_mode=sync, which needs none"),
        (
            {"transfer": {"enable": True, "transfer_mode": "sync", "transfer_timeout_ms": 120_001}, **P2P},
            "transfer_timeout_ms=120001 is refused with transfer_mode=sync: .* 120000 ms at most",
        ),
        ({"transfer": {"transfer_mode": "lazy"}}, r"transfer_mode=lazy is refused: allowed is async \| sync \| pin_sync"),
        ({"transfer": {"transfer_timeout_ms": 0}}, "transfer_timeout_ms=0 is refused"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(given: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_lmcache(config(**given), installed=True)
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")


def test_lmcache_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"not installed: `pip install 'psrl\[lmcache\]'`"):
        check_lmcache(config(), installed=False)


def test_stale_keys_and_values_are_never_possible() -> None:
    for tagged, cleared, shared in product((True, False), repeat=3):
        asked = config(multi_version_kv=tagged, clear_on_weight_update=cleared, **(P2P if shared else {}))
        safe = tagged and not cleared if shared else tagged or cleared
        if safe:
            warnings = check_lmcache(asked, installed=True)
            assert len(warnings) == (tagged and cleared)
        else:
            with pytest.raises(ConfigError):
                check_lmcache(asked, installed=True)


def test_an_offload_tier_may_weigh_only_where_there_is_one() -> None:
    for enable in (True, False):
        asked = config(enable=enable)
        asked.psrl.rollout_coordination.routing_strategy.cache_aware_policy.lmcache_overlap_weight = 0.5
        if enable:
            check_routing(asked)
        else:
            with pytest.raises(ConfigError, match=r"psrl\.lmcache\.enable=False"):
                check_routing(asked)


def settings(ranks: int = 1, transfer: KVTransferConfig | None = None, **given) -> LMCacheSettings:
    peer = peer_address("10.0.0.5", range(9000, 9000 + PORTS_PER_RANK * ranks)) if "enable_p2p" in given else None
    lmcache, transfer = LMCacheConfig(enable=True, **given), transfer or KVTransferConfig()
    return lmcache_settings(lmcache, transfer, instance="instance-1", ranks=ranks, peer=peer)


def test_sizes_are_shared_out_over_ranks() -> None:
    assert settings(ranks=4).engine_config["max_local_cpu_size"] == 25.0
    disk = settings(ranks=4, backend="disk", disk_path="/scratch/kv", max_disk_size_gb=400.0).engine_config
    assert (disk["max_local_cpu_size"], disk["max_local_disk_size"]) == (25.0, 100.0)
    assert disk["local_disk"] == "/scratch/kv/instance-1/"


def test_without_p2p_nothing_listens() -> None:
    made = settings()
    assert not {key for key in made.engine_config if "port" in key or "controller" in key or "p2p" in key}
    assert made.kv_transfer_config["kv_connector_module_path"] == "psrl.rollout.lmcache_connector"
    assert made.environment == {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}


@pytest.mark.parametrize("mode", ["sync", "pin_sync"])
def test_where_psrl_fetches_first_engines_ask_nobody(mode: str) -> None:
    transfer = {"enable": True, "transfer_mode": mode}
    check_lmcache(config(transfer=transfer, enable_p2p=True), installed=True)  # no controller needed
    alone = settings()
    assert settings(transfer=KVTransferConfig(**transfer), enable_p2p=True) == alone
    tcp = settings(transfer=KVTransferConfig(**transfer), enable_p2p=True, p2p_transfer_channel="tcp")
    assert tcp.environment == alone.environment | {"UCX_TLS": "tcp"}


def test_a_chunk_has_one_name_in_every_process() -> None:
    for given in ({}, P2P, {"backend": "disk", "disk_path": "/scratch"}):
        made = settings(**given)
        assert made.engine_config["pre_caching_hash_algorithm"] == "sha256_cbor"
        assert made.environment["PYTHONHASHSEED"] == "0"


def test_a_lease_is_as_long_as_the_longest_wait_that_is_allowed() -> None:
    assert LONGEST_WAIT_MS == 1000 * LONGEST_LEASE_S


def test_every_rank_has_ports_of_its_own() -> None:
    shared = settings(ranks=2, **P2P).engine_config
    ports = [*shared["lmcache_worker_ports"], *shared["p2p_init_ports"], *shared["p2p_lookup_ports"]]
    assert sorted(ports) == list(range(9000, 9006))
    assert shared["p2p_host"] == "10.0.0.5" and shared["controller_pull_url"] == "node7:8300"


def test_a_transfer_has_a_deadline_of_its_own() -> None:
    transfer = KVTransferConfig(enable=True, transfer_timeout_ms=700)
    assert settings(transfer=transfer, **P2P).engine_config["lookup_timeout_ms"] == 700
    assert "lookup_timeout_ms" not in settings(**P2P).engine_config


def test_tcp_is_nixl_over_tcp_alone() -> None:
    assert "UCX_TLS" not in settings(**P2P).environment
    over_tcp = settings(**P2P, p2p_transfer_channel="tcp")
    assert over_tcp.environment["UCX_TLS"] == "tcp"
    assert over_tcp.engine_config["transfer_channel"] == "nixl"


def test_one_setting_is_said_in_one_place(tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("blocking_timeout_secs: 3\n")
    assert settings(config_file=str(file)).environment["LMCACHE_CONFIG_FILE"] == str(file)
    file.write_text("chunk_size: 16\nlocal_cpu: false\n")
    with pytest.raises(ConfigError, match=r"names chunk_size, local_cpu, which psrl\.lmcache\.\* decides"):
        settings(config_file=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        settings(config_file=str(tmp_path / "absent.yaml"))


def test_an_identity_is_one_version_of_one_incarnation_of_one_run() -> None:
    wanted = list(product(("run-a", "run-b"), (0, 1, 11), (0, 1, 10, 11, 110)))
    made = [cache_identity(*which) for which in wanted]
    assert len({identity.cache_salt for identity in made}) == len(wanted)
    assert len({identity.kv_transfer_params[TAG] for identity in made}) == len(wanted)
    assert all(identity.cache_salt.isalnum() and len(identity.cache_salt) <= 128 for identity in made)
    assert cache_identity("run-a", 2, 3, multi_version=False).kv_transfer_params == {}


def test_the_engine_alone_sees_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.delenv("LMCACHE_TRACK_USAGE", raising=False)
    with environment({"UCX_TLS": "tcp", "LMCACHE_TRACK_USAGE": "false"}):
        assert (os.environ["UCX_TLS"], os.environ["LMCACHE_TRACK_USAGE"]) == ("tcp", "false")
    assert os.environ["UCX_TLS"] == "all" and "LMCACHE_TRACK_USAGE" not in os.environ


def test_an_instance_listens_where_its_run_does(tmp_path: Path) -> None:
    asked = config(**P2P)
    role = Role(RunDir(tmp_path), asked, "instance-1", "node", local=True, attempt="a")
    made = instance_lmcache(role, ranks=2)
    assert made is not None and made.engine_config["p2p_host"] == "127.0.0.1"
    ports = [port for name in PORT_LISTS for port in made.engine_config[name]]
    assert len(set(ports)) == 2 * PORTS_PER_RANK
    asked.psrl.lmcache.enable = False
    assert instance_lmcache(role, ranks=2) is None


class EngineOfWorkers:
    version, on_gpu = 3, True

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []

    def call_workers(self, method: str, *args: dict, timeout_s: float) -> list:
        self.calls.append((method, *args))
        return [[]]

    def close(self) -> None:
        pass


def test_only_sync_modes_put_something_before_the_engine(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    create_keys(run_dir)
    for mode, pin_at_once in (("async", None), ("sync", False), ("pin_sync", True)):
        asked = config(transfer={"enable": True, "transfer_mode": mode, "transfer_timeout_ms": 700}, **P2P)
        engine = EngineOfWorkers()
        made = with_transfers(Role(run_dir, asked, "instance-1", "node7", local=True, attempt="a"), engine)
        if pin_at_once is None:
            assert made is engine and engine.calls == []
            continue
        made.close()
        assert engine.calls == [
            (
                "psrl_share_prefixes",
                {
                    "run_dir": str(tmp_path),
                    "instance": "instance-1",
                    "node": "node7",
                    "address": "127.0.0.1",
                    "pin_at_once": pin_at_once,
                },
            )
        ]
