"""The library's boundary: the shared libraries export exactly the functions of the public headers,
and every header compiles by itself as C and as C++."""
import glob
import os
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

LIBRARIES = os.path.join(os.path.dirname(os.path.dirname(program.PROGRAM)), "lib")
INCLUDE = os.path.join(program.SOURCE, "include")
HEADERS = sorted(os.path.relpath(path, INCLUDE) for path in glob.glob(os.path.join(INCLUDE, "quadrille", "*.h")))


def declarations(header):
    """The statements of a header at the outermost level, without comments, preprocessor lines and
    bodies."""
    with open(os.path.join(INCLUDE, header), encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^QD_SIZED_DEFAULT\w*\(\w+\)$", "", text, flags=re.MULTILINE)
    while re.search(r"\{[^{}]*\}", text):
        text = re.sub(r"\{[^{}]*\}", ";" if re.search(r"static inline[^;{}]*\{[^{}]*\}", text) else " ", text, count=1)
    return [" ".join(statement.split()) for statement in text.split(";") if statement.strip()]


def public_functions():
    """Name of each function that the headers declare: its statement."""
    found = {}
    for header in HEADERS:
        for statement in declarations(header):
            name = re.search(r"\b(qd_\w+) ?\(", re.sub(r"__attribute__ ?\(\(.*?\)\)", "", statement))
            if name and not statement.startswith(("typedef", "static inline")):
                found[name.group(1)] = f"{header}: {statement}"
    return found


@unittest.skipUnless(shutil.which("nm"), "no nm")
class Exports(unittest.TestCase):
    def exported(self, library):
        path = os.path.join(LIBRARIES, library)
        if not os.path.exists(path):
            self.skipTest(f"this build has no {library}")
        lines = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout.splitlines()
        return {line.split()[-1].split("@")[0] for line in lines}

    def test_every_function_of_the_headers_is_marked(self):
        functions = public_functions()
        self.assertGreater(len(functions), 200)
        self.assertEqual([text for text in functions.values() if ": QD_API " not in text], [])

    def test_exported_symbols_are_the_public_functions(self):
        functions = set(public_functions())
        exported = self.exported("libquadrille.so")
        self.assertEqual((exported - functions, functions - exported), (set(), set()))

    def test_the_planning_library_exports_a_part_of_them(self):
        exported = self.exported("libquadrille-plan.so")
        self.assertEqual(exported - set(public_functions()), set())
        for name in ("qd_version", "qd_options_create", "qd_check", "qd_simulate", "qd_plan"):
            self.assertIn(name, exported)
        self.assertNotIn("qd_train", exported)


# Structs that the library allocates and hands out through const pointers: they grow at their end.
HANDED_OUT = {"qd_train_summary", "qd_tokenize_progress", "qd_sim_report", "qd_sim_stage", "qd_plan_report", "qd_plan_against",
              "qd_plan_choice", "qd_plan_progress"}
# Structs that do not change: passed by value, elements of arrays, parts of others.
FIXED = {"qd_prompt", "qd_option", "qd_option_table", "qd_strbuf", "qd_tokens", "qd_json_writer", "qd_comm_where", "qd_segment", "qd_segment_list",
         "qd_document_rule", "qd_check_line", "qd_check_formula", "qd_check_stage", "qd_sim_line", "qd_sim_score", "qd_scaling_point",
         "qd_plan_row", "qd_bench_row", "qd_bench_collectives_row", "qd_bench_product", "qd_bench_exchange", "qd_report_figure",
         "qd_report_series", "qd_report_memory_rank", "qd_report_event", "qd_report_rank", "qd_report_mark",
         "qd_report_table"}


class Structs(unittest.TestCase):
    """quadrille/sized.h: what callers allocate begins with its size and has a default."""

    def test_every_struct_can_grow_or_does_not_change(self):
        structs, defaults = {}, set()
        for header in HEADERS:
            with open(os.path.join(INCLUDE, header), encoding="utf-8") as file:
                text = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.DOTALL)
            structs.update(re.findall(r"typedef struct (\w+) \{\s*([^;]*);", text))
            defaults.update(re.findall(r"^QD_SIZED_DEFAULT\w*\((\w+)\)$", text, flags=re.MULTILINE))
        sized = {name for name, first in structs.items() if first == "size_t size"}
        self.assertGreater(len(sized), 30)
        self.assertEqual(set(structs) - sized, HANDED_OUT | FIXED)
        self.assertEqual(sized, defaults)


class Headers(program.ProgramTest):
    def compile(self, *command):
        result = subprocess.run([*command, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", f"-I{INCLUDE}"], cwd=self.folder,
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)

    @unittest.skipUnless(shutil.which("cc"), "no C compiler")
    def test_each_compiles_alone(self):
        for number, header in enumerate(HEADERS):
            self.write(f"one{number}.c", f"#include <{header}>\nint nothing;\n")
        self.compile("cc", "-std=c11", *(f"one{number}.c" for number in range(len(HEADERS))))

    @unittest.skipUnless(shutil.which("c++"), "no C++ compiler")
    def test_a_cpp_program_includes_all(self):
        includes = "".join(f"#include <{header}>\n" for header in HEADERS)
        self.write("all.cpp", includes + "int main() { return qd_version()[0] == QD_VERSION[0] && qd_generate_options_default().tokens == 200 ? 0 : 1; }\n")
        self.compile("c++", "-std=c++17", "all.cpp")
        if os.path.exists(os.path.join(LIBRARIES, "libquadrille.so")) and not program.SANITIZED:
            subprocess.run(["c++", f"-I{INCLUDE}", "all.cpp", f"-L{LIBRARIES}", "-lquadrille", f"-Wl,-rpath,{LIBRARIES}", "-o", "all"],
                           cwd=self.folder, check=True)
            subprocess.run(["./all"], cwd=self.folder, check=True)


# A program that trains with ranks as processes, and has things to do before and after.
EMBEDDER = r"""
#include <quadrille/config.h>
#include <quadrille/train.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void goodbye(void)
{
    printf("exit handler\n");
}

int main(int argc, char **argv)
{
    const qd_option_table table = qd_config_table();
    qd_options *options = NULL;
    atexit(goodbye);
    printf("before\n"); /* stays in the buffer of a pipe */
    qd_status status = qd_options_create(&table, 1, &options);
    for (int i = 1; i < argc && status == QD_OK; i++)
        status = qd_options_assign(options, argv[i]);
    if (status == QD_OK)
        status = qd_train(options, argv, NULL);
    printf("after %s: %s\n", qd_status_text(status), qd_error_message());
    qd_options_destroy(options);
    return status == QD_OK ? 0 : 3;
}
"""


@unittest.skipUnless(shutil.which("cc") and os.path.exists(os.path.join(LIBRARIES, "libquadrille.so")) and not program.SANITIZED,
                     "no C compiler, or no shared library")
class Embedding(program.ProgramTest):
    def build(self, name, text):
        self.write(name + ".c", text)
        subprocess.run(["cc", "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{INCLUDE}", name + ".c", f"-L{LIBRARIES}",
                        "-lquadrille", f"-Wl,-rpath,{LIBRARIES}", "-o", name], cwd=self.folder, check=True)

    def call(self, name, *words):
        return subprocess.run([self.path(name), *words], cwd=self.folder, capture_output=True, text=True, timeout=100, check=False)

    def test_ranks_end_inside_train(self):
        self.build("embedder", EMBEDDER)
        words = [*self.small("train.steps=2", "parallel.ranks=3", "train.global_batch=9")[1:]]
        result = self.call("embedder", *words)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "before\nafter ok: \nexit handler\n", ""))
        # a failure of the ranks is returned once, too, with what the rank that failed had to say
        result = self.call("embedder", *words, "train.optimizer=sgd", "train.lr=1000", "train.clip=0", "train.steps=20")
        self.assertEqual((result.returncode, result.stderr), (3, ""), result.stdout)
        self.assertEqual(result.stdout.count("after "), 1, result.stdout)
        self.assertIn("its loss is not a finite number", result.stdout)


if __name__ == "__main__":
    unittest.main()
