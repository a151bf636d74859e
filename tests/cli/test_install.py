"""An installation works: the program, the libraries (shared and static), their headers, pkg-config
files and CMake package. The examples are built against it and run, after it was moved."""
import json
import os
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

BUILD = os.path.dirname(os.path.dirname(program.PROGRAM))
EXAMPLES = os.path.join(program.SOURCE, "examples")
COMPILER = shutil.which("cc")
STEPS = 21  # the example evaluates after 20


def example(name):
    with open(os.path.join(EXAMPLES, name + ".c"), encoding="utf-8") as file:
        return file.read()


def library_of(name):
    """What the comment at the head of an example links."""
    return re.search(r"--libs (\S+)\)", example(name)).group(1)


def words_of(name):
    """The arguments that it is called with there."""
    return re.search(rf"\./{name} (.*)", example(name)).group(1).split()


@unittest.skipUnless(COMPILER and shutil.which("pkg-config") and shutil.which("cmake"), "no compiler, pkg-config or cmake")
@unittest.skipIf(program.SANITIZED, "programs outside of the build have no sanitizer")
class Install(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.call("cmake", "--install", BUILD, "--prefix", self.path("first"))
        os.rename(self.path("first"), self.path("moved"))
        self.libraries = next(folder for folder, _, files in os.walk(self.path("moved")) if "libquadrille-plan.so" in files)

    def call(self, *command, **environment):
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, errors="replace", timeout=100, check=False,
                                env={**os.environ, **environment})
        self.assertEqual(result.returncode, 0, f"{command}: {result.stdout}{result.stderr}")
        return result.stdout

    def build(self, name, source, library, *more):
        flags = self.call("pkg-config", *more, "--cflags", "--libs", library,
                          PKG_CONFIG_PATH=os.path.join(self.libraries, "pkgconfig")).split()
        self.call(COMPILER, "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", source, *flags, "-o", name)

    def use(self, name, *words):
        """Runs a program that was built against the shared libraries, or against the archives."""
        return self.call("./" + name, *words, LD_LIBRARY_PATH=self.libraries)

    def remove_shared_libraries(self):
        """A library that is found as .so would hide what static linking lacks."""
        for file in os.listdir(self.libraries):
            if ".so" in file:
                os.remove(os.path.join(self.libraries, file))

    def check_train(self):
        """Four ranks as threads have the losses of `quadrille train`, bit by bit."""
        settings = re.search(r"settings\[\] =(.*?);", example("train"), re.DOTALL).group(1)
        self.write("settings.yaml", "".join(json.loads(text) for text in re.findall(r'".*"', settings)))
        words = [f"data.path={self.corpus}", f"train.steps={STEPS}", "run.overwrite=true"]
        said = self.use("train", *words, "run.dir=ours")
        self.ok(self.run_program("train", "settings.yaml", *words, "run.dir=theirs"))
        self.assertEqual(len(self.numbers("ours")), STEPS)
        self.assertEqual(self.numbers("ours"), self.numbers("theirs"))
        self.assertIn("dp 4", said)
        self.assertEqual([float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", said, re.MULTILINE)],
                         [round(line["loss"], 4) for line in self.metrics("theirs")])
        held_out = re.search(r"^held out: loss (\S+), (\S+) bits per byte$", said, re.MULTILINE)
        self.assertTrue(held_out, said)
        last = f"theirs/checkpoints/step-{STEPS:012d}"
        ours = json.loads(self.ok(self.run_program("eval", last.replace("theirs", "ours"), "--json")).stdout)
        theirs = json.loads(self.ok(self.run_program("eval", last, "--json")).stdout)
        self.assertEqual(ours["loss"], theirs["loss"])

    def check_examples(self):
        self.check_train()
        self.assertRegex(self.use("generate", "ours", "the quick"), rf"^the quick[\s\S]*\n\(60 tokens in .* step {STEPS}\)\n$")
        said = self.use("simulate", *words_of("simulate"))
        self.assertTrue(said.startswith("llama3.1-8b on 64 x NVIDIA H100 SXM 80 GB: ") and "does not fit" not in said, said)
        self.assertRegex(self.use("plan", *words_of("plan")), r"^llama3.1-8b on 64 x .*: \d+ layouts fit\n1\. .*\n2\. .*\n3\. ")
        self.assertIn("zero", self.ok(self.run_program("check", "plan.yaml")).stdout.lower())

    def test_examples(self):
        names = ["train", "generate", "simulate", "plan"]
        self.assertEqual(sorted(names), sorted(name[:-2] for name in os.listdir(EXAMPLES) if name.endswith(".c")))
        self.assertLessEqual(example("train").count("\n"), 80)
        for name in names:
            self.build(name, os.path.join(EXAMPLES, name + ".c"), library_of(name))
        self.check_examples()
        self.build("both", os.path.join(EXAMPLES, "simulate.c"), "quadrille")  # has all of the planning library
        self.use("both", *words_of("simulate"))
        self.remove_shared_libraries()
        for name in names:
            self.build(name, os.path.join(EXAMPLES, name + ".c"), library_of(name), "--static")
        self.check_examples()

    def test_cmake_project(self):
        source = os.path.join(EXAMPLES, "cmake-project")
        words = ["model.preset=llama-tiny", "parallel.ranks=4", "parallel.zero=1"]
        peak = json.loads(self.run_program("check", *words, "--json").stdout)["memory_bytes_per_rank"] / 2**20
        for folder, more in (("shared", []), ("static", ["-DQuadrille_STATIC=ON"])):
            self.call("cmake", "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={self.path('moved')}", *more)
            self.call("cmake", "--build", folder)
            said = self.call(f"{folder}/memory", *words)
            self.assertIn(f"{peak:.2f} MiB  per rank", said)
            self.assertTrue(said.startswith("Quadrille 0.1.0: llama"), said)
            linked = self.call("ldd", f"{folder}/memory")
            self.assertEqual("libquadrille-plan.so" in linked, folder == "shared", linked)
        # The training library, with everything that its archive needs.
        self.write("CMakeLists.txt", "cmake_minimum_required(VERSION 3.22)\nproject(one LANGUAGES C)\nfind_package(Quadrille REQUIRED)\n"
                                     f"add_executable(train {EXAMPLES}/train.c)\ntarget_link_libraries(train Quadrille::quadrille)\n")
        self.call("cmake", "-S", ".", "-B", "one", f"-DCMAKE_PREFIX_PATH={self.path('moved')}", "-DQuadrille_STATIC=ON")
        self.call("cmake", "--build", "one")
        self.assertIn("step 1  loss", self.call("one/train", f"data.path={self.corpus}", "train.steps=1"))
        result = subprocess.run(["cmake", "-S", source, "-B", "other", f"-DCMAKE_PREFIX_PATH={self.path('moved')}",
                                 "-DCMAKE_PROJECT_memory-of-a-run_INCLUDE=" + self.write("other.cmake", "find_package(Quadrille 9.9 REQUIRED)\n")],
                                cwd=self.folder, capture_output=True, text=True, check=False)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("9.9", result.stderr)

    def test_program_and_headers(self):
        self.assertEqual(self.call(self.path("moved/bin/quadrille"), "version"), self.call(program.PROGRAM, "version"))
        for path in ("man/man1/quadrille.1", "man/man1/quadrille-train.1", "man/man5/quadrille-config.5", "zsh/site-functions/_quadrille",
                     "bash-completion/completions/quadrille", "doc/quadrille/LICENSE", "doc/quadrille/docs/tutorial.md"):
            self.assertGreater(os.path.getsize(self.path("moved/share/" + path)), 500, path)
        for header in os.listdir(self.path("moved/include/quadrille")):
            self.write("one.c", f"#include <quadrille/{header}>\nint nothing;\n")
            self.call(COMPILER, "-std=c11", "-Wall", "-pedantic", "-Werror", "-fsyntax-only", f"-I{self.path('moved/include')}", "one.c")


if __name__ == "__main__":
    unittest.main()
