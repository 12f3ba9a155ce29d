"""The peers' virtual environments, benchmarks/.envs/PEER: python -m benchmarks.environments [PEER ...]

Each peer has its own, as they disagree about the versions of what they share. Built once; an environment
whose list of packages has changed since is built anew. Without a name, those of all engines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACE = HERE / ".envs"
TORCH = "torch==2.13.0"  # the one of constraints.txt, so that no engine gains by its age


@dataclass(frozen=True)
class Environment:
    """The packages of a peer. `variables` are for the build of those that are compiled here."""

    packages: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def recipe(self) -> str:
        return "\n".join([*self.packages, *(f"{name}={value}" for name, value in self.variables.items())])


# engines that generate, which `benchmarks.run` compares
ENGINES = {
    # compiled for this machine's instruction set, with its own kernels: minutes. Where it has AMX, GCC would
    # leave out stores that only the configuration of the tiles reads: an illegal instruction follows
    "llama": Environment(
        ("--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36", "numpy"),
        {
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_BLAS=OFF -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF "
            "-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-tree-dce -fno-dse -fno-dce'"
        },
    ),
    "openvino": Environment(("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", TORCH)),
    "ctranslate2": Environment(("ctranslate2==4.8.5", "transformers==5.24.0", TORCH)),
    "transformers": Environment(("transformers==5.24.0", TORCH)),
}
# what explains, which `benchmarks.explain` compares
EXPLAINERS = {
    "transformer_lens": Environment(("transformer-lens==4.3.0", "transformers==5.24.0", TORCH)),
}
ENVIRONMENTS = ENGINES | EXPLAINERS


def python(peer: str) -> Path:
    """The interpreter of a peer's environment, whether it is there or not."""
    return PLACE / peer / "bin" / "python"


def ready(peer: str) -> bool:
    """Whether a peer's environment is built, and of the packages that are asked for now."""
    built = PLACE / peer / "recipe.txt"
    return built.is_file() and built.read_text() == ENVIRONMENTS[peer].recipe()


def build(peer: str) -> None:
    """Builds a peer's environment from nothing. Raises CalledProcessError where pip fails."""
    environment, folder = ENVIRONMENTS[peer], PLACE / peer
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    # a Python without ensurepip makes an environment without pip: the outer pip works for all of them
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python(peer))]
    install = [*pip, "install", "--quiet"]
    variables = {**os.environ, **environment.variables}
    # what pip has compiled before may be for another machine, or by other variables
    fresh = ["--no-cache-dir"] if environment.variables else []
    subprocess.run([*install, *fresh, *environment.packages], check=True, env=variables)
    (folder / "recipe.txt").write_text(environment.recipe())


def main(peers: list[str]) -> None:
    unknown = sorted(set(peers) - set(ENVIRONMENTS))
    if unknown:
        sys.exit(f"{unknown[0]} is no peer ({', '.join(ENVIRONMENTS)}).")
    failed = []
    for peer in peers or ENGINES:
        if ready(peer):
            continue
        sys.stderr.write(f"Setting up {peer} (once) ...\n")
        try:
            build(peer)
        except subprocess.CalledProcessError:
            failed.append(peer)
    if failed:
        sys.exit(f"Could not be set up, and will be left out: {', '.join(failed)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
