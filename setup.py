"""The compiled part of the package; all else is in pyproject.toml."""

from setuptools import Extension, setup

# Plain C, no Python module, called by ctypes; blips does without it where it cannot be built.
# Not -ffast-math: linked into a library, it would change the arithmetic of the whole process.
kernels = Extension(
    "blips.bayes._kernels",
    ["src/blips/bayes/kernels.c"],
    extra_compile_args=[
        "-O3",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-signed-zeros",
        "-fassociative-math",
    ],
    optional=True,
)

setup(ext_modules=[kernels])
