"""The compiled part of the package; all else is in pyproject.toml."""

from setuptools import Extension, setup

# Plain C, no Python module, called by ctypes; blips does without it where it cannot be built.
# Not -ffast-math: linked into a library, it would change the arithmetic of the whole process.
OPTIONS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=off"]

setup(
    ext_modules=[
        Extension(
            "blips.backbones._messages",
            ["src/blips/backbones/messages.c"],
            extra_compile_args=OPTIONS,
            optional=True,
        )
    ]
)
