"""Two hosts with addresses of their own: namespaces joined by a veth pair. Needs root; skips with the reason."""

import textwrap

import pytest
from rig.clusters.namespaces import DEADLINE, PYTHON, bagua, hosts_up, start_cluster
from rig.ranks.elastic import PROGRAM

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def hosts(tmp_path):
    with hosts_up(tmp_path) as made:
        yield made


def test_service_on_two_hosts_with_tls(hosts, tmp_path):
    """Coordinator and a daemon on one host, a daemon on the other; mutual TLS; one rank each; one sum."""
    reach = start_cluster(hosts, tmp_path, (), ())
    for host in range(2):
        assert "connections to other hosts are encrypted" in (tmp_path / f"services-{host}.log").read_text()
    (tmp_path / "sum.py").write_text(PROGRAM)
    (tmp_path / "stop").touch()  # after the first sum
    size = ["--elastic", "--nnodes", "2", "--nproc-per-node", "1", "--workdir", str(tmp_path)]
    # From the other host: the client, too, comes with TLS and the token.
    output = hosts.run(1, *bagua("job", "submit", *size, "--watch", *reach, str(tmp_path / "sum.py")))
    assert all(f"generation 1 rank {rank} of 2 sum 1" in output for rank in (0, 1)) and "succeeded" in output, output


@pytest.mark.full  # test_ephemeral.py has two agents of torchrun on this machine
@pytest.mark.parametrize("secret", ["7c4f0e5a91d2b3867c4f0e5a91d2b386", ""], ids=["with a secret", "without one"])
def test_scripts_started_by_torchrun_style_environment_on_two_hosts(hosts, sandbox, tmp_path, secret):
    """No daemon anywhere: each host's first rank brings one up, and nothing is left at the end. Without a secret that
    the hosts share, every rank says what to set."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import bagua.torch_api as bagua

        bagua.init_process_group()
        tensor = torch.tensor([float(bagua.get_rank())])
        bagua.allreduce_inplace(tensor)
        if bagua.get_rank() == 0:  # the coordinator listens where others reach this host, and nowhere else
            import os, psutil
            for process in psutil.process_iter(["cmdline"]):
                if "bagua.daemon.ephemeral" in (process.info["cmdline"] or []):
                    if process.environ().get("BAGUA_TEST_MARK") == os.environ["BAGUA_TEST_MARK"]:
                        found = [c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"]
                        assert [ip.removeprefix("::ffff:") for ip in found] == [os.environ["MASTER_ADDR"]], found
                        print("listens", flush=True)
        bagua.barrier()
        print("sum", tensor.item(), flush=True)
        """)
    )
    ranks = []
    for rank in range(4):
        environment = {
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": str(rank // 2), "GROUP_RANK": str(rank // 2),
            "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "veth0",
            "BAGUA_JOB_SECRET": secret, "XDG_CONFIG_HOME": str(tmp_path),
            "BAGUA_TEST_MARK": sandbox.mark,
        }  # fmt: skip
        ranks.append(hosts.start(rank // 2, PYTHON, "-P", str(script), env=environment))
    outputs = [process.communicate(timeout=DEADLINE)[0] for process in ranks]
    if secret:
        assert [process.returncode for process in ranks] == [0] * 4, "\n".join(outputs)
        assert all("sum 6.0" in output for output in outputs) and "listens" in outputs[0], outputs
    else:
        assert all(process.returncode == 1 for process in ranks)
        assert all("set BAGUA_JOB_SECRET or BAGUA_JOB_SECRET_FILE" in output for output in outputs), outputs
    sandbox.assert_all_gone(15.0)
