"""Isolates this process, then execs one program. A separate script (`python -I -S jail.py CONFIG STATUS`), stdlib only.

    this process    new user, mount, pid, network, ipc, uts and cgroup namespaces; waits
    └── pid 1       its own root file system, no capabilities, an unprivileged uid; reaps, reports the exit
        └── pid 2   resource limits, system-call filter, no descriptors except 0, 1 and 2; then the program

If the first process dies, pid 1 is killed, and the kernel then kills everything inside. CONFIG and STATUS are descriptor
numbers: a JSON file to read, and a pipe to write JSON lines to. Neither is open in the program.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET, NEW_NS = (
    0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00020000,
)  # fmt: skip
NOSUID, NODEV, NOEXEC, BIND, RECURSIVE, PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
SET_PDEATHSIG, SET_DUMPABLE, CAPBSET_DROP, SET_SECCOMP, SET_NO_NEW_PRIVS = 1, 4, 24, 22, 38
CAPABILITY_VERSION, SECCOMP_MODE_FILTER, SECCOMP_INSTRUCTION = 0x20080522, 2, 8
OLD, NEW = "/old", "/new"


def main() -> None:
    config_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(config_fd, encoding="utf-8") as file:
        config = json.load(file)
    os.set_inheritable(status_fd, False)
    die_with(config["parent"])
    try:
        if config["isolate"]:
            isolate(config, status_fd)
        else:  # bubblewrap has isolated it already, or the recipe turns isolation off
            become(config, status_fd)
    except OSError as error:
        report(status_fd, error=f"{error.filename2 or error.filename or 'system call'}: {error.strerror}")
        os._exit(1)


def report(status_fd: int, **facts: Any) -> None:
    os.write(status_fd, json.dumps(facts).encode() + b"\n")


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when its parent ends, even if the parent is killed."""
    check(libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


# Namespaces


def isolate(config: dict[str, Any], status_fd: int) -> None:
    uid, gid, inside = os.geteuid(), os.getegid(), config["uid"]
    privileged = uid == 0
    ready, mapped = os.pipe(), os.pipe()
    me = os.getpid()
    helper = os.fork()
    if helper == 0:  # stays outside: more than one id can be mapped only from there
        os.close(ready[1])
        os.close(mapped[0])
        if not os.read(ready[0], 1):
            os._exit(1)
        try:
            if not privileged:
                write(f"/proc/{me}/setgroups", "deny")
            root = "0 0 1\n" if privileged else ""
            write(f"/proc/{me}/uid_map", f"{root}{inside} {inside if privileged else uid} 1\n")
            write(f"/proc/{me}/gid_map", f"{root}{inside} {inside if privileged else gid} 1\n")
        except OSError as error:
            os.write(mapped[1], f"{error.filename}: {error.strerror}".encode())
        os._exit(0)
    os.close(ready[0])
    os.close(mapped[1])
    check(libc.unshare(NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS | NEW_CGROUP), "unshare")
    os.write(ready[1], b"1")
    problem = os.read(mapped[0], 500)
    os.waitpid(helper, 0)
    if problem:
        report(status_fd, error=problem.decode())
        os._exit(1)
    init = os.fork()
    if init == 0:
        try:
            first_process(config, status_fd, privileged)
        except OSError as error:
            report(status_fd, error=f"{error.filename2 or error.filename or 'system call'}: {error.strerror}")
        os._exit(1)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    os.waitpid(init, 0)
    os._exit(0)


def first_process(config: dict[str, Any], status_fd: int, privileged: bool) -> None:
    """Pid 1 of the new namespace: builds the root, drops all privileges, starts the program and reaps."""
    die_with(None)
    os.setsid()  # a signal to the program's process group must not reach outside
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    build_root(config)
    libc.sethostname(b"sandbox", 7)
    drop_rights(config["uid"], privileged)
    die_with(None)  # again: the change of user clears it
    program = os.fork()
    if program == 0:
        os.setsid()
        try:
            become(config, status_fd)
        except OSError as error:
            report(status_fd, error=f"{error.filename or 'system call'}: {error.strerror}")
        os._exit(1)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            report(status_fd, code=os.waitstatus_to_exitcode(status))
            os._exit(0)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode() or None), f"mount {target}")  # fmt: skip


def protect(target: str, attributes: int, recursive: bool = True) -> None:
    """Set mount attributes such as read-only, for a whole tree of mounts at once."""
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    where = ctypes.c_char_p(target.encode())
    flags = AT_RECURSIVE if recursive else 0
    check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, where, flags, ctypes.byref(values), 32), f"mount_setattr {target}")


def build_root(config: dict[str, Any]) -> None:
    """A fresh root: the system read-only, /proc of this pid namespace, four devices, a small /tmp, and nothing else."""
    mount("none", "/", "none", RECURSIVE | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for name in (OLD, NEW):
        os.mkdir(f"/tmp{name}")
    check(libc.pivot_root(b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    mount("tmpfs", NEW, "tmpfs", NOSUID, "size=1m,mode=755")
    os.mkdir(NEW + "/tmp")
    size = f"size={config['disk']},nr_inodes=4096,mode=1777"
    mount("tmpfs", NEW + "/tmp", "tmpfs", NOSUID | NODEV | NOEXEC, size)
    for path, target in config["links"].items():
        os.symlink(target, NEW + path)
    for source, target in config["binds"].items():  # some may be below /tmp, which exists by now
        place = NEW + target
        if os.path.isdir(OLD + source):
            os.makedirs(place, mode=0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
            write(place, "")
        mount(OLD + source, place, "none", BIND | RECURSIVE)
        protect(place, READ_ONLY | NOSUID | NODEV)
    os.mkdir(NEW + "/dev")
    for name in ("null", "zero", "random", "urandom"):
        write(f"{NEW}/dev/{name}", "")
        mount(f"{OLD}/dev/{name}", f"{NEW}/dev/{name}", "none", BIND)
    os.symlink("/proc/self/fd", NEW + "/dev/fd")
    os.mkdir(NEW + "/proc")
    try:
        mount("proc", NEW + "/proc", "proc", NOSUID | NODEV | NOEXEC)
        write(NEW + "/proc/sys/user/max_user_namespaces", "0")
        protect(NEW + "/proc", READ_ONLY)
    except PermissionError:
        pass  # a container with a masked /proc: the program gets an empty one
    check(libc.umount2(OLD.encode(), DETACH), "umount of the old root")
    os.chdir(NEW)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount of the old root")
    os.chdir("/")
    protect("/", READ_ONLY, recursive=False)


def drop_rights(uid: int, privileged: bool) -> None:
    for capability in range(64):
        if libc.prctl(CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    if privileged:
        os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")
    check(libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "prctl(DUMPABLE)")
    check(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


# The program


def become(config: dict[str, Any], status_fd: int) -> None:
    os.chdir(config["directory"])
    for name, text in config["files"].items():
        write(name, text)
    for name, limit in config["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (limit, limit) if hard < 0 else (min(limit, hard), min(limit, hard)))
    for descriptor in sorted(int(name) for name in os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else range(3, 256):  # fmt: skip
        if descriptor > 2:
            try:
                os.set_inheritable(descriptor, False)
            except OSError:
                continue  # the listing's own descriptor
    os.umask(0o077)
    check(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
    report(status_fd, started=True)
    if config["filter"]:
        install_filter(base64.b64decode(config["filter"]))
    os.execve(config["argv"][0], config["argv"], config["environment"])


def install_filter(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    value = Program(len(program) // SECCOMP_INSTRUCTION, program)
    check(libc.prctl(SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(value), 0, 0), "prctl(SECCOMP)")


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


if __name__ == "__main__":
    main()
