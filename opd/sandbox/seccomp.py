"""The sandbox's system-call filter, as the bytes that the kernel expects (classic BPF). Needs no library.

Namespaces hide files, processes and networks. The filter blocks what they leave open: socket families that ignore network
namespaces (vsock reaches a virtual machine's host), memory outside the size limits (memfd, System V segments), nested
namespaces, tracing, and kernel features that no test program needs. Blocked calls fail with EPERM.
"""

from __future__ import annotations

import os
import struct

# names -> (x86_64, aarch64); None: the call does not exist there
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "vmsplice": (278, 75), "fanotify_init": (300, 262),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "uselib": (134, None),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag
AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def machine() -> str | None:
    """This machine's architecture; None if the filter does not support it."""
    name = os.uname().machine
    return name if name in AUDIT_ARCHITECTURE else None


def program(architecture: str) -> bytes:
    column = list(AUDIT_ARCHITECTURE).index(architecture)
    refused = [numbers[column] for numbers in REFUSED.values()]
    lines = [
        _line(LOAD, ARCHITECTURE),
        _line(EQUAL, AUDIT_ARCHITECTURE[architecture], 1, 0),
        _line(RETURN, KILL),
        _line(LOAD, NUMBER),
        _line(AT_LEAST, X32, 0, 1),
        _line(RETURN, KILL),
        _line(EQUAL, CLONE3[column], 0, 1),
        _line(RETURN, ENOSYS),  # the C library falls back to clone, whose flags the filter can read
    ]
    for number in refused:
        if number is not None:
            lines += [_line(EQUAL, number, 0, 1), _line(RETURN, EPERM)]
    lines += [
        _line(EQUAL, CLONE[column], 0, 3),
        _line(LOAD, FIRST_ARGUMENT),
        _line(ANY_BIT, NEW_NAMESPACES, 0, 1),
        _line(RETURN, EPERM),
        _line(RETURN, ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
