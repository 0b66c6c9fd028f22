# SPDX-License-Identifier: Apache-2.0
"""`pega doctor`: its checks one by one, and as a whole in environments that are really broken."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_pega_connector import cli, doctor, machine
from vllm_pega_connector import doctor_checks as checks
from vllm_pega_connector.address import HostPort
from vllm_pega_connector.gpu import Driver

pytest.importorskip("vllm_pega_connector._native")

H200 = Driver(13000, ("NVIDIA H200",))


@pytest.fixture
def pega(capsys):
    """Runs the command in this process: (status, standard output, standard error)."""

    def run(*arguments):
        status = cli.main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_doctor_examines_everything(pega):
    status, out, _ = pega("doctor", "--json", "--listen", "127.0.0.1:0")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert list(found) == ["vLLM", "native module", "GPU", "copy kernels", "memory", "pinned memory", "NUMA",
                           "Mooncake", "RDMA", "ports"]  # fmt: skip
    assert found["native module"]["status"] == "ok"
    assert "127.0.0.1:0 can be bound" in found["ports"]["found"]
    for check in found.values():
        assert check["found"]
        assert check["status"] in ("ok", "warn", "fail")
        assert check["status"] == "ok" or (check["means"] and check["mend"])
        assert "could not be checked" not in check["found"]
    assert status == (1 if "fail" in {check["status"] for check in found.values()} else 0)


def test_doctor_for_people(pega, monkeypatch):
    monkeypatch.setattr(doctor, "ask_driver", lambda: Driver(problem="no [such] library"))
    _, out, _ = pega("doctor")
    assert "no [such] library" in out  # brackets are not taken for markup
    assert "mend:" in out


def test_doctor_fails_with_status_1(pega, monkeypatch):
    monkeypatch.setattr(checks, "check_native", lambda: checks.Check("native module", "fail", "gone", "m", "n"))
    status, out, _ = pega("doctor")
    assert status == 1
    assert "gone" in out


def test_a_check_that_breaks_hides_nothing(monkeypatch):
    monkeypatch.setattr(checks, "available_memory", lambda: 1 // 0)
    found = {check.name: check for check in doctor.examine()}
    assert "ZeroDivisionError" in found["memory"].found
    assert "ports" in found


def test_doctor_on_a_gpu_machine(monkeypatch):
    check = checks.check_gpu(H200)
    assert (check.status, check.found) == ("ok", "1 x NVIDIA H200; driver for CUDA 13.0; device profile h200")
    check = checks.check_gpu(Driver(12080, ("NVIDIA A100", "NVIDIA A100")))
    assert check.status == "warn"
    assert "2 x NVIDIA A100; driver for CUDA 12.8; device profile generic" in check.found

    monkeypatch.setattr(machine, "installed", lambda *names: [])
    check = checks.check_kernels(H200)
    assert (check.status, check.mend) == ("fail", "pip install 'vllm-pega-connector[cuda13]'")
    monkeypatch.setattr(machine, "installed", lambda *names: ["cupy-cuda12x 13.0", "cupy-cuda13x 13.0"])
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in checks.check_kernels(H200).mend
    monkeypatch.setattr(machine, "installed", lambda *names: ["cupy-cuda13x 13.0"])
    monkeypatch.setattr(machine, "run_python", lambda code: (1, "ImportError: libnvrtc.so.13"))
    assert "libnvrtc.so.13" in checks.check_kernels(H200).found
    monkeypatch.setattr(machine, "run_python", lambda code: (0, "NVRTC 13.0"))
    assert checks.check_kernels(H200).status == "ok"


def test_doctor_on_memlock(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    monkeypatch.setattr(machine, "may_lock_anyway", lambda: False)
    check = checks.check_memlock(H200)
    assert (check.status, check.found) == ("warn", "memlock is limited to 8 MiB")
    monkeypatch.setattr(machine, "may_lock_anyway", lambda: True)
    assert "IPC_LOCK" in checks.check_memlock(H200).found
    monkeypatch.setattr(machine, "rdma_devices", lambda: [])
    assert checks.check_memlock(Driver()).status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert checks.check_memlock(H200).found == "memlock is unlimited"


def test_doctor_on_mooncake(monkeypatch):
    cpu, cuda = "mooncake-transfer-engine-non-cuda 0.3", "mooncake-transfer-engine-cuda13 0.3"
    monkeypatch.setattr(machine, "why_not_loaded", lambda name: "")
    monkeypatch.setattr(machine, "run_python", lambda code: (0, ""))
    for have, driver, status, said in [
        ([], Driver(), "warn", "[cpu]"),
        ([], H200, "warn", "[cuda13]"),
        ([cpu], Driver(), "ok", ""),
        ([cuda], H200, "ok", ""),
        ([cuda], Driver(), "fail", "pip uninstall mooncake-transfer-engine-cuda13"),
        ([cpu, cuda], H200, "fail", "pip uninstall mooncake-transfer-engine-non-cuda mooncake"),
    ]:
        monkeypatch.setattr(machine, "installed", lambda *names, have=have: have)
        check = checks.check_mooncake(driver)
        assert (check.status, said in check.mend) == (status, True)
    monkeypatch.setattr(machine, "installed", lambda *names: [cuda])
    monkeypatch.setattr(
        machine, "why_not_loaded", lambda name: name if name in ("libibverbs.so.1", "libmlx5.so.1") else ""
    )
    assert checks.check_mooncake(H200).mend == "apt-get install libibverbs1 ibverbs-providers"
    monkeypatch.setattr(machine, "why_not_loaded", lambda name: "")
    monkeypatch.setattr(machine, "run_python", lambda code: (1, "ImportError: libcudart.so.13"))
    assert "libcudart.so.13" in checks.check_mooncake(H200).found


def test_doctor_on_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = checks.check_ports(HostPort("127.0.0.1", port))
    assert check.status == "fail"
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in check.found
    assert f"ss -ltnp 'sport = :{port}'" in check.mend
    assert checks.check_ports(HostPort("192.0.2.1", 0)).status == "fail"  # an address of nobody (RFC 5737)
    assert checks.check_ports(None).status == "ok"


def test_another_process_is_asked_with_a_limit(monkeypatch):
    assert machine.run_python("print('a'); print('b')") == (0, "b")
    status, said = machine.run_python("import no_such_module")
    assert status != 0
    assert said == "ModuleNotFoundError: No module named 'no_such_module'"
    monkeypatch.setattr(machine, "PYTHON_TIMEOUT_S", 0.2)
    assert machine.run_python("import time; time.sleep(30)") == (1, "no answer within 0.2 s")


def test_numa(monkeypatch, tmp_path):
    assert machine.cpus("0-3,8\n") == {0, 1, 2, 3, 8} and machine.cpus("\n") == set()
    nodes = []
    for number, cpus in enumerate(("0-1", "2-3")):
        nodes.append(tmp_path / f"node{number}")
        nodes[-1].mkdir()
        (nodes[-1] / "cpulist").write_text(cpus)
    monkeypatch.setattr(machine, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    check = checks.check_numa(H200)
    assert check.status == "warn" and "numactl" in check.mend
    assert checks.check_numa(Driver()).status == "ok"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    assert checks.check_numa(H200).found == "2 memory nodes; this process may run on node1"


# --- broken environments: `pega doctor` in a process of its own, with something really wrong around it ---

FAKE_DRIVER = """
int cuDriverGetVersion(int *v) { *v = VERSION; return 0; }
int cuInit(unsigned f) { return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int o) { *d = o; return 0; }
int cuDeviceGetName(char *s, int n, int d) { const char *k = "NVIDIA H200"; while ((*s++ = *k++)) {} return 0; }
"""
CAP_IPC_LOCK = 14
PR_CAPBSET_DROP = 24


def examined(*arguments, env=None, before=None):
    """Exit status and checks by name; the process must say them whatever is broken."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_pega_connector.cli", "doctor", "--json", *arguments],
        env={**os.environ, **(env or {})}, preexec_fn=before, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout)
    assert answer["status"] in ("ok", "warn", "fail")
    return done.returncode, {check["name"]: check for check in answer["checks"]}


@pytest.fixture
def driver(tmp_path):
    """Makes a folder for LD_LIBRARY_PATH with a driver of one H200 that supports the given CUDA version."""

    def make(version):
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
        assert compiler, "a C compiler, as `make setup` installs it"
        source = tmp_path / "driver.c"
        source.write_text(FAKE_DRIVER.replace("VERSION", str(version)))
        language = ["-x", "c++", "-include", "/dev/null"] if compiler.endswith("g++") else []
        out = tmp_path / "libcuda.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-w", *language, str(source), "-o", str(out)], check=True)
        return {"LD_LIBRARY_PATH": str(tmp_path)}

    return make


def test_the_fake_driver_is_believed(driver):
    """So that what the tests below find is due to what they break."""
    _, found = examined(env=driver(13000))
    assert found["GPU"]["status"] == "ok" and "NVIDIA H200; driver for CUDA 13.0" in found["GPU"]["found"]


def test_broken_no_driver(tmp_path):
    (tmp_path / "libcuda.so.1").write_bytes(b"")  # also where there is a driver: what the loader finds first is none
    _, found = examined(env={"LD_LIBRARY_PATH": str(tmp_path)})
    gpu = found["GPU"]
    assert gpu["status"] in ("warn", "fail")
    assert "libcuda.so.1" in gpu["found"] and "install NVIDIA's driver" in gpu["mend"] and "--gpus" in gpu["mend"]


def test_broken_low_memlock(driver):
    def lower():
        # Root is above the limit as long as it has the capability.
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))

    _, found = examined(env=driver(13000), before=lower)
    memory = found["pinned memory"]
    assert (memory["status"], memory["found"]) == ("warn", "memlock is limited to 8 MiB")
    assert "ulimit -l unlimited" in memory["mend"] and "--ulimit memlock=-1" in memory["mend"]


def test_broken_no_libibverbs(tmp_path):
    if not machine.installed(*checks.MOONCAKE):
        pytest.skip("Mooncake is not installed")
    (tmp_path / "libibverbs.so.1").write_bytes(b"")
    status, found = examined(env={"LD_LIBRARY_PATH": str(tmp_path)})
    mooncake = found["Mooncake"]
    assert status == 1 and mooncake["status"] == "fail"
    assert "libibverbs.so.1" in mooncake["found"] and mooncake["mend"] == "apt-get install libibverbs1"
    assert "migration" in mooncake["means"]


def test_broken_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, found = examined("--listen", address)
    ports = found["ports"]
    assert status == 1 and ports["status"] == "fail"
    assert f"cannot listen on {address}: Address already in use" in ports["found"] and "ss -ltnp" in ports["mend"]


def stub_cupy(folder: Path, distribution: str, nvrtc: str) -> dict[str, str]:
    info = folder / f"{distribution.replace('-', '_')}-14.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 14.0\n")
    (folder / "cupy" / "cuda").mkdir(parents=True)
    (folder / "cupy" / "__init__.py").write_text("")
    (folder / "cupy" / "cuda" / "__init__.py").write_text("")
    (folder / "cupy" / "cuda" / "nvrtc.py").write_text(nvrtc)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.parametrize(
    ("version", "distribution", "nvrtc", "status", "found_words", "mend_words"),
    [
        (12080, "cupy-cuda13x", "", "fail", "cupy-cuda13x 14.0, but the driver is for CUDA 12.8",
         "pip uninstall -y cupy-cuda13x, then pip install 'vllm-pega-connector[cuda12]'"),
        (13000, "cupy-cuda13x", "raise ImportError('libnvrtc.so.13: cannot open shared object file')", "fail",
         "libnvrtc.so.13", "pip install 'vllm-pega-connector[cuda13]'"),
        (13000, "cupy-cuda12x", "def getVersion(): return (12, 9)", "ok", "NVRTC 12.9", ""),
    ],
)  # fmt: skip
def test_broken_wrong_cupy(driver, tmp_path, version, distribution, nvrtc, status, found_words, mend_words):
    if machine.installed("cupy-cuda12x", "cupy-cuda13x", "cupy"):
        pytest.skip("a CuPy of its own is installed here")
    code, found = examined(env={**driver(version), **stub_cupy(tmp_path / "site", distribution, nvrtc)})
    kernels = found["copy kernels"]
    assert kernels["status"] == status and found_words in kernels["found"] and mend_words in kernels["mend"]
    assert code == (1 if "fail" in {check["status"] for check in found.values()} else 0)
