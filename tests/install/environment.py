"""Fresh virtual environments in which the wheel is installed, and programs of theirs in a folder of their own."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from following import FOLLOW, ROOT, Block

PIP = ("-m", "pip", "--disable-pip-version-check")


def wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    subprocess.run([sys.executable, *PIP, "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    [built] = folder.glob("langchain_dpicl-*.whl")
    return built


class Environment:
    """A fresh virtual environment and a folder to work in.

    With ``reuse`` it holds the wheel alone, and finds what the wheel requires in the environment of this process.
    """

    def __init__(self, folder: Path, name: str, *, reuse: bool = False) -> None:
        self.home, self.work = folder / name, folder / f"work-{name}"
        self.work.mkdir()
        self.wheel = next(folder.glob("langchain_dpicl-*.whl"), None) or wheel(folder)
        self.reuse = reuse
        pip = ["--without-pip"] if reuse else []
        subprocess.run([sys.executable, "-m", "venv", *pip, self.home], check=True)
        self.bin = self.home / "bin"

    def install(self, extras: str) -> None:
        """Install the wheel with pip, and print packages, size and times."""
        if self.reuse:
            [packages] = self.home.glob("lib/python*/site-packages")
            (packages / "reused.pth").write_text(sysconfig.get_path("purelib"))
            pip = [sys.executable, *PIP, "--python", self.bin / "python", "install", "--no-deps", "-q", self.wheel]
            subprocess.run(pip, check=True)
            return
        began = time.monotonic()
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        pip = [self.bin / "python", *PIP]
        subprocess.run([*pip, "install", "-q", "-c", ROOT / "constraints.txt", f"{self.wheel}{extras}"], check=True)
        seconds = time.monotonic() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
        listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True).stdout
        size = int(subprocess.run(["du", "-sm", self.home], capture_output=True, check=True).stdout.split()[0])
        packages = len(json.loads(listed))
        print(f"langchain-dpicl{extras}: {packages} packages, {size:,} MB, {seconds:.0f} s ({used:.0f} s of processor)")
        if not extras and size > 670:
            raise SystemExit(f"the base install has {size} MB: at most 670 are wanted")

    def restart(self) -> None:
        """Let the next page begin in an empty folder."""
        shutil.rmtree(self.work)
        self.work.mkdir()

    def run(
        self,
        *command: str,
        says: str = "",
        code: tuple[int, ...] = (0,),
        quiet: bool = False,
        place: str = "",
        given: str = "",
    ) -> str:
        """Run a program of the environment. It must end with one of the codes, say these words, and show no trace."""
        began = time.monotonic()
        found = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.work,
            env=self.variables(),
            capture_output=True,
            text=True,
            input=given,
        )
        told = found.stdout + found.stderr
        if not quiet:
            shown = place or " ".join(command)[:100].splitlines()[0]
            print(f"  {time.monotonic() - began:6.1f} s  {shown}", flush=True)
        if found.returncode not in code or says not in told or ("Traceback" in told and command[0] != "python"):
            lines = re.findall(r'File "([\w/.-]+\.(?:md|py))", line (\d+)', told)
            where = "".join(f"{page}:{line}\n" for page, line in lines if not page.startswith("/")) or place
            wanted = f"ended with {found.returncode}, expected {code} and {says!r}"
            raise SystemExit(f"{where}\n{' '.join(command)[:200]}\n{wanted}:\n{told[-3000:]}")
        return told

    def follow(
        self,
        steps: Sequence[Block],
        *,
        own: str = "",
        says: str = "",
        code: tuple[int, ...] = (0,),
        warnings: str = "error",
    ) -> str:
        """Run blocks of Python in one process."""
        given = json.dumps([(step.page, step.line, step.text) for step in steps])
        program = ("python", "-W", warnings, "-c", FOLLOW, own)
        return self.run(*program, given=given, says=says, code=code, place=steps[-1].place)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of its programs: nothing comes from the network."""
        path = f"{self.bin}:{os.environ['PATH']}"
        return {"DPICL_DEMO_CUSTOMERS": "150", **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "PATH": path}
