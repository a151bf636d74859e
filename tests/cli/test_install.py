"""An installation works: the program, the libraries (shared and static), their headers and
pkg-config files."""
import os
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

BUILD = os.path.dirname(os.path.dirname(program.PROGRAM))
COMPILER = shutil.which("cc")


class Install(program.ProgramTest):
    def call(self, *command, **environment):
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=100, check=False,
                                env={**os.environ, **environment})
        self.assertEqual(result.returncode, 0, f"{command}: {result.stdout}{result.stderr}")
        return result.stdout

    @unittest.skipUnless(COMPILER and shutil.which("pkg-config") and shutil.which("cmake"), "no compiler, pkg-config or cmake")
    def test_a_program_of_ones_own(self):
        self.call("cmake", "--install", BUILD, "--prefix", self.path("first"))
        os.rename(self.path("first"), self.path("moved"))
        libraries = next(folder for folder, _, files in os.walk(self.path("moved")) if "libquadrille-plan.so" in files)
        found = {"PKG_CONFIG_PATH": os.path.join(libraries, "pkgconfig")}
        source = os.path.join(program.SOURCE, "examples", "simulate.c")
        expected = "llama3.1-8b on 64 x NVIDIA H100 SXM 80 GB: "
        with open(source, encoding="utf-8") as file:  # as the comment at its head has it
            words = next(line for line in file if "./simulate" in line).split("./simulate")[1].split()
        for library in ("quadrille-plan", "quadrille"):
            flags = self.call("pkg-config", "--cflags", "--libs", library, **found).split()
            self.call(COMPILER, "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", source, *flags, "-o", library)
            said = self.call("./" + library, *words, LD_LIBRARY_PATH=libraries)
            self.assertTrue(said.startswith(expected) and "does not fit" not in said, said)
        # The same from the archives, with their dependencies: in builds with CUDA its run time,
        # too. A library that is found as .so would hide what is missing.
        for file in os.listdir(libraries):
            if ".so" in file:
                os.remove(os.path.join(libraries, file))
        for library in ("quadrille-plan", "quadrille"):
            flags = self.call("pkg-config", "--static", "--cflags", "--libs", library, **found).split()
            self.call(COMPILER, source, *flags, "-o", library + "-static")
            said = self.call(f"./{library}-static", *words)
            self.assertTrue(said.startswith(expected), said)
        # the trainer takes everything with it, kernels for GPUs among them
        self.write("train.c", "#include <quadrille/train.h>\nqd_status (*volatile train)() = (qd_status(*)())qd_train;\n"
                              "int main(void) { return train ? 0 : 1; }\n")
        self.call(COMPILER, "-std=c11", "train.c", *flags, "-o", "trainer")
        self.call("./trainer")
        self.assertEqual(self.call(self.path("moved/bin/quadrille"), "version"), self.call(program.PROGRAM, "version"))
        for header in os.listdir(self.path("moved/include/quadrille")):
            self.write("one.c", f"#include <quadrille/{header}>\nint nothing;\n")
            self.call(COMPILER, "-std=c11", "-Wall", "-pedantic", "-Werror", "-fsyntax-only", f"-I{self.path('moved/include')}", "one.c")


if __name__ == "__main__":
    unittest.main()
