"""Escape attempts, each carried out in the sandbox: what it reaches for must be out of reach, and nothing may survive it.

Every attempt prints what it tried; a success prints ESCAPED. So an attempt that never ran fails its test too.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from opd import sandbox
from opd.common.errors import RecipeError
from opd.sandbox import MEGABYTE, Cell, Limits, Outcome, walls

KINDS = [kind for kind in ("namespaces", "bubblewrap") if not sandbox.why_unusable(kind)]
needs_sandbox = pytest.mark.skipif(not KINDS, reason="no sandbox works on this machine")
pytestmark = needs_sandbox
PRELUDE = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, act):
    try:
        found = act()
    except (OSError, MemoryError, ValueError) as error:
        print("tried", what, type(error).__name__, flush=True)
    else:
        print("ESCAPED", what, repr(found)[:200], flush=True)
def system_call(what, name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        print("tried", what, os.strerror(ctypes.get_errno()), flush=True)
    else:
        print("ESCAPED", what, flush=True)
"""


@pytest.fixture(params=KINDS or ["none"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(kind: str, code: str, *arguments: str, **limits: float) -> Outcome:
    program = PRELUDE + textwrap.dedent(code)
    command = [sandbox.python(), "-I", "-B", "main.py", *arguments]
    values = {"seconds": 100.0, "memory": 256 * MEGABYTE, **limits}
    outcome = sandbox.run_program(command, kind=kind, limits=Limits(**values), files={"main.py": program})  # type: ignore[arg-type]
    assert not outcome.error
    return outcome


def refused(outcome: Outcome, attempts: int) -> str:
    """Nothing escaped, and that many attempts were really made."""
    said = outcome.stdout.decode()
    assert "ESCAPED" not in said, said
    assert said.count("tried") == attempts, said + outcome.stderr.decode()
    return said


def survivors(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if marker.encode() in words and path.parent.name != str(os.getpid()):
            found.append(words.decode(errors="replace"))
    return found


def gone(marker: str, seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while survivors(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not survivors(marker)


def test_an_honest_program_runs(kind: str) -> None:
    outcome = run(kind, "import json, math; print(json.dumps({'pi': math.floor(math.pi)}))\nexit(3)")
    assert (outcome.stdout, outcome.code) == (b'{"pi": 3}\n', 3)
    echo = sandbox.run_program(
        [sandbox.python(), "-I", "-c", "print(len(input()))"], kind=kind, limits=Limits(), stdin=b"x" * 200_000
    )
    assert echo.stdout == b"200000\n"


def test_home_and_files_of_others(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("ESCAPED")
    code = f"""
        attempt("a file of the host", lambda: open({str(secret)!r}).read())
        attempt("passwords", lambda: open("/etc/shadow").read())
        attempt("users", lambda: open("/etc/passwd").read())
        attempt("keys", lambda: os.listdir({str(Path.home() / ".ssh")!r}))
        attempt("configuration", lambda: os.listdir({str(Path.home() / ".config")!r}))
        attempt("the package itself", lambda: os.listdir({str(Path(sandbox.__file__).parent)!r}))
        home = {str(Path.home())!r}
        print("home", os.listdir(home) if os.path.isdir(home) else [])
    """
    said = refused(run(kind, code), 6)
    inside = Path(os.path.realpath(sys.base_prefix))
    allowed = [inside.relative_to(Path.home()).parts[0]] if inside.is_relative_to(Path.home()) else []
    assert f"home {allowed}" in said


def test_environment(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEST_SECRET", "hunter2")
    code = """
        print(sorted(os.environ))
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    print(open(f"/proc/{name}/environ").read(), open(f"/proc/{name}/cmdline").read())
                except OSError:
                    print("tried", name)
    """
    said = run(kind, code).stdout.decode()
    assert "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH']" in said
    assert "hunter2" not in said


def test_sockets(kind: str) -> None:
    """Among them a service that really listens on this machine, and one on an abstract name."""
    name = f"\0opd-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        port = server.getsockname()[1]
        code = f"""
            attempt("localhost", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
            attempt("the world", lambda: socket.create_connection(("1.1.1.1", 53), 2))
            attempt("names", lambda: socket.getaddrinfo("example.com", 80))
            attempt("UDP", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port})))
            attempt("IPv6", lambda: socket.socket(socket.AF_INET6).bind(("::1", 0)))
            attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect({name!r}))
            attempt("raw", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
            attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
            attempt("the virtual machine's host", lambda: socket.socket(socket.AF_VSOCK).connect((2, 1)))
            print("interfaces", [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line])
        """
        said = refused(run(kind, code), 9)
    assert "interfaces ['lo']" in said  # the network namespace holds by itself, not only the filter


def test_forking_without_end(kind: str) -> None:
    marker = uuid.uuid4().hex
    code = """
        started = 0
        for _ in range(200):
            try:
                if os.fork() == 0:
                    time.sleep(3600)
                    os._exit(0)
                started += 1
            except OSError:
                break
        print("started", started)
    """
    outcome = run(kind, code, marker, processes=6)
    started = int(outcome.stdout.split()[-1])
    assert 1 <= started <= 8
    assert gone(marker)


def test_fork_bomb(kind: str) -> None:
    marker = uuid.uuid4().hex
    begun = time.monotonic()
    outcome = run(kind, """
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """, marker, processes=4, seconds=1.0)  # fmt: skip
    assert outcome.timed_out
    assert time.monotonic() - begun < 600
    assert gone(marker)


def test_threads_count_too(kind: str) -> None:
    code = """
        import threading
        started = 0
        try:
            for _ in range(100):
                threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
                started += 1
        except RuntimeError:
            pass
        print("started", started, flush=True)
        os._exit(0)
    """
    assert int(run(kind, code, processes=6, memory=2048 * MEGABYTE).stdout.split()[-1]) <= 8


def test_memory(kind: str) -> None:
    code = """
        import mmap
        held = []
        def fill(step):
            for _ in range(100):
                held.append(step())
            return len(held)
        attempt("heap", lambda: fill(lambda: bytearray(16 << 20)))
        held.clear()
        attempt("mappings", lambda: fill(lambda: mmap.mmap(-1, 16 << 20)))
        held.clear()
        attempt("memfd", lambda: os.memfd_create("x"))
        system_call("segments", "shmget", 0, 1 << 20, 0o1600)
        system_call("message queues", "msgget", 0, 0o1600)
        attempt("shared memory", lambda: open("/dev/shm/x", "w"))
        import resource
        attempt("raise the limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)))
    """
    refused(run(kind, code), 7)


def test_disk(kind: str) -> None:
    code = """
        written = 0
        try:
            for number in range(100):
                with open(f"big{number}", "wb", buffering=0) as file:
                    for _ in range(4):
                        written += file.write(bytes(1 << 20))
        except OSError as error:
            print("stopped", error.errno)
        print("written", written)
        for number in range(100):
            if os.path.exists(f"big{number}"):
                os.unlink(f"big{number}")
        files = 0
        try:
            for number in range(20_000):
                open(f"small{number}", "w").close()
                files += 1
        except OSError:
            pass
        print("files", files)
    """
    said = dict(line.split() for line in run(kind, code, disk=8 * MEGABYTE).stdout.decode().splitlines())
    assert 0 < int(said["written"]) <= 8 * MEGABYTE
    assert kind == "bubblewrap" or int(said["files"]) <= 4096


def test_writing_outside(kind: str) -> None:
    places = ["/x", "/usr/x", "/usr/bin/x", "/lib/x", "/bin/x", "/dev/x", "/etc/x", "/root/x", "/home/x", "/proc/1/oom_score_adj",
              "/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/sys/x", "/var/tmp/x", f"{sys.base_prefix}/x",
              "/proc/sys/user/max_user_namespaces", os.path.realpath(sys.executable)]  # fmt: skip
    code = f"""
        for place in {places!r}:
            attempt(place, lambda: open(place, "w").write("x"))
    """
    refused(run(kind, code), len(places))
    assert not Path("/var/tmp/x").exists()


def test_nothing_is_left_in_the_shared_tmp(kind: str) -> None:
    name = f"opd-{uuid.uuid4().hex}"
    outcome = run(kind, f"open('/tmp/{name}', 'w').write('x'); print(os.path.exists('/tmp/{name}'))")
    assert outcome.stdout == b"True\n"
    assert not Path("/tmp", name).exists()


def test_killing_others(kind: str) -> None:
    """The host's processes have no number inside; pid 1 ignores what comes from inside; a group signal stays inside."""
    victim = subprocess.Popen(["sleep", "3600"])
    try:
        code = f"""
            attempt("the host's process", lambda: os.kill({victim.pid}, 9))
            attempt("the host's parent", lambda: os.kill({os.getpid()}, 0))
            os.kill(1, signal.SIGINT)
            os.kill(1, signal.SIGTERM)
            os.kill(1, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(0, signal.SIGTERM)
            if os.fork() == 0:
                time.sleep(3600)
            os.kill(-1, signal.SIGKILL)
            os.wait()
            print("visible", sorted(int(name) for name in os.listdir("/proc") if name.isdigit()), os.getppid())
        """
        outcome = run(kind, code)
        assert "visible [1, 2] 1" in refused(outcome, 2)
        assert outcome.code == 0
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_links_out(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("ESCAPED")
    code = f"""
        os.symlink({str(secret)!r}, "direct")
        os.symlink("/proc/1/root" + {str(secret)!r}, "through-init")
        os.symlink("/proc/self/root/../../../.." + {str(secret)!r}, "upwards")
        for name in ("direct", "through-init", "upwards"):
            attempt(name, lambda: open(name).read())
        attempt("hard link", lambda: os.link("/usr/bin/env", "linked"))
        print("root above root", os.listdir("/..") == os.listdir("/"))
    """
    assert "root above root True" in refused(run(kind, code), 4)


def test_proc_of_other_processes(kind: str) -> None:
    code = """
        for name in ("environ", "mem", "maps", "root/etc", "cwd", "fd", "auxv"):
            attempt(name, lambda: open(f"/proc/1/{name}", "rb").read(1) or "empty")
        attempt("write memory", lambda: open("/proc/1/mem", "r+b"))
        attempt("kernel memory", lambda: open("/proc/kcore", "rb").read(1))
    """
    said = run(kind, code).stdout.decode()
    if kind == "namespaces":  # bubblewrap's pid 1 is of the same user: readable, and nobody's secret
        refused(run(kind, code), 9)
    assert "ESCAPED root/etc" not in said
    assert "ESCAPED kernel memory" not in said


def test_rights(kind: str) -> None:
    code = """
        system_call("ptrace", "ptrace", 16, 1, 0, 0)
        system_call("mount", "mount", b"none", b"/tmp", b"tmpfs", 0, 0)
        system_call("umount", "umount2", b"/proc", 2)
        system_call("new user namespace", "unshare", 0x10000000)
        system_call("new mount namespace", "unshare", 0x00020000)
        system_call("chroot", "chroot", b"/tmp")
        system_call("raw clone with a namespace", "syscall", {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000011, 0, 0, 0, 0)
        system_call("clone3", "syscall", 435, 0, 0)
        system_call("bpf", "syscall", {"x86_64": 321, "aarch64": 280}[os.uname().machine], 0, 0, 0)
        system_call("io_uring", "syscall", 425, 1, 0)
        system_call("host name", "sethostname", b"x", 1)
        attempt("root", lambda: os.setuid(0))
        attempt("another user", lambda: os.setuid(1000))
        attempt("groups", lambda: os.setgroups([0]))
        attempt("device", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
        attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
        facts = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
        print({name: facts[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")})
    """
    said = refused(run(kind, code), 16)
    zero = "0" * 16
    assert f"{{'CapPrm': '{zero}', 'CapEff': '{zero}', 'CapBnd': '{zero}', 'NoNewPrivs': '1', 'Seccomp': '2'}}" in said


def test_endless_output(kind: str) -> None:
    for stream in ("stdout", "stderr"):
        outcome = run(kind, f"while True: sys.{stream}.write('x' * 10_000)", output=100_000)
        assert outcome.flooded
        assert len(outcome.stdout) + len(outcome.stderr) <= 200_000


@pytest.mark.parametrize("code", ["while True: pass", "signal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(1)"])
def test_endless_loop(kind: str, code: str) -> None:
    begun = time.monotonic()
    outcome = run(kind, code, seconds=0.5)
    assert outcome.timed_out
    assert outcome.code is None
    assert time.monotonic() - begun < 600


def test_nothing_survives_the_program(kind: str) -> None:
    marker = uuid.uuid4().hex
    code = """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        os.wait()
        print("left a daemon")
    """
    outcome = run(kind, code, marker)
    assert outcome.stdout == b"left a daemon\n"
    assert outcome.code == 0
    assert gone(marker)


def test_inherited_descriptors(kind: str) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        code = """
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"forged")
                    print("ESCAPED", descriptor)
                except OSError:
                    pass
            print("tried")
        """
        outcome = run(kind, code)
        refused(outcome, 1)
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 10)
    finally:
        os.close(reading)
        os.close(writing)


def test_the_sandbox_dies_with_its_owner(kind: str, tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    script = tmp_path / "owner.py"
    script.write_text(
        "import sys\nfrom opd import sandbox\n"
        f"sandbox.run_program([sandbox.python(), '-I', '-c', 'import time; time.sleep(3600)', {marker!r}], kind={kind!r},"
        " limits=sandbox.Limits(seconds=3600))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen([sys.executable, str(script)], env=environment)
    deadline = time.monotonic() + 300
    while not survivors(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert survivors(marker)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert gone(marker)


def test_it_raises_if_no_sandbox_works() -> None:
    """Tried inside the sandbox itself, where no further namespace can be made."""
    packages = [os.path.realpath(path) for path in sys.path if path.endswith("site-packages")]
    source = str(Path(sandbox.__file__).parents[1])
    cell = Cell(
        {source: "/opd-package/opd", **{path: path for path in packages}},
        {"PYTHONPATH": os.pathsep.join(["/opd-package", *packages])},
    )
    code = (
        "from opd import sandbox\nfrom opd.common.errors import RecipeError\n"
        "try: sandbox.choose('auto')\nexcept RecipeError as error: print(error)"
    )
    process, status = sandbox.start(
        [sandbox.python(), "-B", "-c", code],
        kind=KINDS[0],
        limits=Limits(seconds=600, memory=2048 * MEGABYTE),
        cell=cell,
    )
    said, _ = process.communicate(timeout=600)
    os.close(status)
    assert b"no sandbox for model-written code works here" in said
    assert b"bwrap is not installed" in said or b"bubblewrap" in said
    assert b"unshare: Operation not permitted" in said
    assert b"write `rewards: {sandbox: none}`" in said


def test_without_a_sandbox_only_if_requested_and_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="opd.sandbox"):
        assert sandbox.choose("none") == "none"
    assert "WITHOUT A SANDBOX" in caplog.text
    outcome = run("none", "print(os.getuid(), sorted(os.environ)); open('x', 'w').write('y')")
    assert outcome.stdout.startswith(str(os.getuid()).encode())
    assert not Path("x").exists()
    assert run("none", "while True: pass", seconds=0.5).timed_out


def test_bubblewrap_is_rejected_as_root() -> None:
    if os.geteuid() != 0 or sandbox.why_unusable("bubblewrap") == "bwrap is not installed":
        pytest.skip("needs root and bwrap")
    with pytest.raises(RecipeError, match="does not apply to root"):
        sandbox.choose("bubblewrap")


def test_every_call_of_the_filter_is_denied(kind: str) -> None:
    column = list(walls.AUDIT_ARCHITECTURE).index(os.uname().machine)
    numbers = {name: found[column] for name, found in walls.BLOCKED.items() if found[column] is not None}
    code = f"""
        for name, number in {numbers!r}.items():
            system_call(name, "syscall", number, 0, 0, 0, 0, 0)
    """
    said = refused(run(kind, code), len(numbers))
    assert said.count("Operation not permitted") == len(numbers)
