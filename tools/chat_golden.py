#!/usr/bin/env python3
"""Renders chat templates with transformers, to compare src/data/chat with it.

    python3 -m venv venv && venv/bin/pip install transformers jinja2
    venv/bin/python tools/chat_golden.py golden      # writes tests/unit/data/chat/golden.json
    venv/bin/python tools/chat_golden.py oracle --program build/release/tests/unit/test_chat --count 5000

golden: every template of tests/unit/data/chat/templates with every conversation of conversations.json,
and the lines of expressions.txt. oracle: random templates and mutated fixtures, rendered by both;
texts must be equal, and what one refuses the other refuses too, except for what the interpreter does
not implement ("not implemented" in its message), and unknown filters and tests in branches that are
not executed, which it refuses when it loads the template; both are counted. The exit status is 1 on a
difference.
"""
import argparse
import collections
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
from datetime import datetime

import jinja2
from transformers.utils import chat_template_utils

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "tests", "unit", "data", "chat"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BROKEN = object()
DATE = "2025-03-09 14:05:07"


class FixedClock:
    @staticmethod
    def now():
        return datetime.strptime(DATE, "%Y-%m-%d %H:%M:%S")


chat_template_utils.datetime = FixedClock


def render(template, messages, tools=None, documents=None, variables=None, add_generation_prompt=False, spans=False):
    """(text, None), (None, message of raise_exception) or (None, None) for other errors; spans in bytes."""
    try:
        texts, indices = chat_template_utils.render_jinja_template(
            [messages], tools=tools, documents=documents, chat_template=template, add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=spans, **{**TOKENS, **(variables or {})})
    except jinja2.exceptions.TemplateError as error:
        return None, str(error) if type(error) is jinja2.exceptions.TemplateError else None
    except NameError:  # the Python code that Jinja generates is wrong
        return None, BROKEN
    except Exception:  # whatever Python raises inside a template
        return None, None
    if spans:
        return texts[0], [[len(texts[0][:i].encode()) for i in pair] for pair in indices[0]]
    return texts[0], None


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


def templates():
    names = sorted(os.path.basename(path)[:-6] for path in glob.glob(os.path.join(ROOT, "templates", "*.jinja")))
    return {name: read(f"templates/{name}.jinja") for name in names}


def golden():
    conversations = json.loads(read("conversations.json"))
    cases = []
    for name, template in templates().items():
        for index, (label, conversation) in enumerate(conversations.items()):
            prompt = conversation.get("add_generation_prompt", (index + len(name)) % 2 == 0)
            spans = "{%- generation %}" in template
            text, more = render(template, conversation["messages"], conversation.get("tools"), conversation.get("documents"),
                                conversation.get("variables"), prompt, spans)
            case = {"template": name, "conversation": label, "add_generation_prompt": prompt}
            if text is not None:
                case["text"] = text
                if spans:
                    case["spans"] = more
            else:
                case["raises"] = more or ""
            cases.append(case)
    expressions = []
    for line in read("expressions.txt").splitlines():
        if line and not line.startswith("# "):
            source = json.loads(line) if line.startswith('"') else line
            text, _ = render(source, conversations["sample"]["messages"], variables=conversations["sample"]["variables"])
            expressions.append({"template": source, "text": text})
    with open(os.path.join(ROOT, "golden.json"), "w", encoding="utf-8") as file:
        parts = [",\n".join(json.dumps(each, ensure_ascii=False) for each in part) for part in (cases, expressions)]
        file.write('{"cases": [\n' + parts[0] + '\n],\n"expressions": [\n' + parts[1] + "\n]}\n")
    refused = sum("raises" in case for case in cases)
    print(f"{len(cases)} cases ({refused} refused), {len(expressions)} expressions")


# ---- random templates ----

NAMES = {"string": ["s", "t", "messages[0].content", "messages[0]['role']", "m.content", "u"], "int": ["i", "j", "n"],
         "list": ["l", "words", "messages", "ll"], "dict": ["d", "messages[0]", "messages[-1]", "nested"], "bool": ["yes", "no"],
         "any": ["missing", "d.missing", "none", "x", "d['a']", "nested.list[0]", "l[5]", "loop.index", "ns.a", "f"]}
VARIABLES = {"s": "hello World", "t": "  a b\n\tc ", "u": "Grüße 你好 🙂 'q' \"d\"", "i": 3, "j": -7, "n": 0, "f": 2.5, "yes": True, "no": False,
             "l": [1, 2, 3, "x", None], "words": ["b", "A", "c d", "", "b"], "ll": [[1, 2], [3, 4], []], "d": {"a": 1, "b": "two", "items": [1]},
             "nested": {"list": [{"k": "v", "n": 1}, {"k": "w"}], "map": {"x": {"y": "z"}}, "text": "a.b,c"}, "x": "X"}
MESSAGES = [{"role": "system", "content": "Be <brief> & \"kind\"."}, {"role": "user", "content": " Hi \n"},
            {"role": "assistant", "content": "line\nline 2", "tool_calls": []}, {"role": "user", "content": "日本"}]


class Grammar:
    def __init__(self, rng):
        self.rng = rng

    def pick(self, *options):
        return self.rng.choice(options)

    def literal(self):
        text = self.pick("", "a", "b", " ", "\\n", "o", "lo", "é", "{{", "%}", "a\\'b", "x y", "<|im|>", "\\u00e9", "1", "7", "-3", "2.5", "ABC")
        return "'" + text + "'" if self.rng.random() < 0.8 else '"' + text.replace("\\'", "'") + '"'

    def of(self, kind, depth):
        rng = self.rng
        if rng.random() < 0.06:
            kind = self.pick("string", "int", "list", "dict", "bool", "any")
        if kind != "any" and rng.random() < 0.35:
            return self.pick(*NAMES[kind])
        if depth <= 0:
            return {"string": self.literal, "int": lambda: str(rng.randint(-3, 12)), "list": lambda: self.pick("[]", "[1, 'a']", "l", "words"),
                    "dict": lambda: self.pick("{}", "{'k': 1}", "d"), "bool": lambda: self.pick("true", "false", "True", "not yes"),
                    "any": lambda: self.pick(*NAMES["any"])}[kind]()
        return getattr(self, kind)(depth - 1)

    def string(self, depth):
        o, s = self.of, lambda: self.of("string", depth)
        n = self.rng.randint(-4, 6)
        return self.rng.choice([
            lambda: f"{s()} + {s()}", lambda: f"{s()} ~ {o('any', depth)} ~ {o('int', depth)}", lambda: f"{s()}|trim", lambda: f"({s()})|upper",
            lambda: f"({s()}).strip()", lambda: f"({s()}).{self.pick('strip', 'lstrip', 'rstrip')}({self.literal()})",
            lambda: f"({s()})[{n}:]", lambda: f"({s()})[:{n}]", lambda: f"({s()})[::{self.pick(-1, 2, -2, 3)}]", lambda: f"({s()})[{n}:{-n}]",
            lambda: f"({s()})[{n}]", lambda: f"({s()})|replace({self.literal()}, {self.literal()})",
            lambda: f"({s()}).replace({self.literal()}, {self.literal()}, {n})", lambda: f"{o('list', depth)}|join({self.literal()})",
            lambda: f"{o('any', depth)}|tojson", lambda: f"({o('dict', depth)})|tojson(indent={self.pick(0, 2, 4)})",
            lambda: f"{o('list', depth)}|tojson(ensure_ascii={self.pick('true', 'false')}, separators=(',', ':'), sort_keys=true)",
            lambda: f"({s()})|indent({self.pick(1, 2, 4)}{self.pick('', ', true', ', first=true', ', blank=true')})",
            lambda: f"({s()})|{self.pick('title', 'capitalize', 'lower', 'string', 'reverse', 'safe', 'first', 'last')}",
            lambda: f"({s()}).{self.pick('title', 'capitalize', 'lower', 'upper')}()", lambda: f"{o('any', depth)}|default({s()}{self.pick('', ', true')})",
            lambda: f"({s()} if {o('bool', depth)} else {s()})", lambda: f"({s()} if {o('bool', depth)})", lambda: f"({s()}) * {self.pick(0, 1, 2)}",
            lambda: f"({s()}).join({o('list', depth)})", lambda: f"({s()}).partition({self.literal()})[{self.pick(0, 1, 2)}]",
            lambda: f"({s()}).{self.pick('removeprefix', 'removesuffix')}({self.literal()})", lambda: f"({o('any', depth)})|string",
            lambda: f"({s()}).{self.pick('split', 'rsplit')}({self.pick('', self.literal(), 'none', self.literal() + ', 1')})[{self.pick(0, -1, 1)}]",
        ])()

    def int(self, depth):
        o, i = self.of, lambda: self.of("int", depth)
        return self.rng.choice([
            lambda: f"{i()} {self.pick('+', '-', '*', '//', '%', '/')} {i()}", lambda: f"({i()} {self.pick('+', '-')} {i()}) * {i()}",
            lambda: f"-{i()}", lambda: f"{o('list', depth)}|length", lambda: f"({o('string', depth)})|length", lambda: f"{o('string', depth)}|int",
            lambda: f"({i()})|abs", lambda: f"({o('string', depth)}).{self.pick('find', 'count', 'rfind', 'index')}({self.literal()})",
            lambda: f"{o('any', depth)}|int({self.pick('', '5', 'default=2')})", lambda: f"{i()}|float",
            lambda: f"{self.pick(2, 3, -1)} ** {self.pick(0, 1, 3, -1)}",
            lambda: f"({o('list', depth)}).{self.pick('index', 'count')}({o('any', depth)})",
            lambda: f"{self.pick('1.5', '1e3', '0.1', '1_000', '0x1f', '0b11')} + {i()}",
        ])()

    def bool(self, depth):
        o, b = self.of, lambda: self.of("bool", depth)
        tests = ["defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "true", "false", "integer",
                 "float", "not defined", "not none", "not string", "callable"]
        return self.rng.choice([
            lambda: f"{b()} and {b()}", lambda: f"{b()} or {b()}", lambda: f"not {b()}", lambda: f"({o('any', depth)}) is {self.pick(*tests)}",
            lambda: f"({o('string', depth)}) is {self.pick('lower', 'upper', *tests)}", lambda: f"({o('list', depth)}) is {self.pick(*tests)}",
            lambda: f"({o('dict', depth)}) is {self.pick(*tests)}",
            lambda: f"{o('int', depth)} {self.pick('<', '>', '<=', '>=', '==', '!=')} {o('int', depth)}",
            lambda: f"{o('string', depth)} {self.pick('<', '==', '!=', 'in', 'not in')} {o('string', depth)}",
            lambda: f"{o('any', depth)} {self.pick('==', '!=', 'in', 'not in')} {o('list', depth)}", lambda: f"{self.literal()} in {o('dict', depth)}",
            lambda: f"{o('int', depth)} < {o('int', depth)} <= {o('int', depth)}",
            lambda: f"({o('int', depth)}) is {self.pick('odd', 'even', 'divisibleby 3')}",
            lambda: f"({o('string', depth)}).{self.pick('startswith', 'endswith')}({self.literal()})",
            lambda: f"{o('any', depth)} is sameas {self.pick('none', 'true')}",
            lambda: f"({o('string', depth)}).{self.pick('isdigit', 'isalpha', 'isspace', 'isalnum')}()",
            lambda: f"{o('any', depth)} is in {o('list', depth)}", lambda: f"{o('any', depth)} == {o('any', depth)}",
            lambda: f"{o('list', depth)} == {o('list', depth)}", lambda: f"{o('dict', depth)} == {o('dict', depth)}",
        ])()

    def list(self, depth):
        o, li = self.of, lambda: self.of("list", depth)
        n = self.rng.randint(-3, 4)
        return self.rng.choice([
            lambda: "[" + ", ".join(o("any", depth) for _ in range(self.rng.randint(0, 3))) + "]", lambda: f"({li()})[{n}:]", lambda: f"({li()})[::-1]",
            lambda: f"({li()})[:{n}]", lambda: f"({li()})[{n}:{self.pick(2, -1)}:{self.pick(1, 2, -1)}]", lambda: f"{li()} + {li()}",
            lambda: f"({li()})|list",
            lambda: f"({li()})|reverse|list",
            lambda: f"messages|selectattr('role', '{self.pick('equalto', 'ne', 'in', 'eq')}', {self.pick(self.literal(), chr(39) + 'user' + chr(39))})|list",
            lambda: f"messages|{self.pick('selectattr', 'rejectattr')}('{self.pick('role', 'missing', 'tool_calls')}')|list",
            lambda: f"{li()}|{self.pick('select', 'reject')}('{self.pick('string', 'number', 'defined', 'none')}')|list",
            lambda: f"{li()}|{self.pick('select', 'reject')}|list",
            lambda: f"messages|map(attribute='{self.pick('role', 'content', 'x.y', 'content.0')}'{self.pick('', ', default=1')})|list",
            lambda: f"{li()}|map('{self.pick('string', 'length', 'upper', 'trim', 'default')}')|list",
            lambda: f"({o('dict', depth)}).{self.pick('items', 'keys', 'values')}()",
            lambda: f"{o('dict', depth)}|items|list", lambda: f"range({self.pick('3', '1, 4', '5, 0, -2', '0')})",
            lambda: f"({o('string', depth)}).split({self.pick('', self.literal())})",
            lambda: f"({o('string', depth)}).splitlines({self.pick('', 'true')})", lambda: f"({o('any', depth)}, {o('int', depth)})",
            lambda: f"{o('string', depth)}|list",
            lambda: f"({li()} if {o('bool', depth)} else {li()})", lambda: f"({li()}) * 2", lambda: f"{o('dict', depth)}|list",
        ])()

    def dict(self, depth):
        o = self.of
        return self.rng.choice([
            lambda: "{" + ", ".join(f"{self.literal()}: {o('any', depth)}" for _ in range(self.rng.randint(0, 3))) + "}",
            lambda: f"dict({self.pick('', 'a=1, b=' + o('any', depth))})", lambda: f"({o('list', depth)})[{self.pick(0, -1)}]", lambda: "nested.map",
            lambda: "nested['map'].x",
            lambda: f"(nested if {o('bool', depth)} else d)",
        ])()

    def any(self, depth):
        kind = self.pick("string", "int", "list", "dict", "bool", "any", "any")
        if kind != "any":
            return self.of(kind, depth)
        o = self.of
        return self.rng.choice([
            lambda: f"({o('dict', depth)}).{self.pick('a', 'k', 'missing', 'list', 'role')}",
            lambda: f"({o('dict', depth)})[{self.pick(self.literal(), chr(39) + 'a' + chr(39))}]",
            lambda: f"({o('list', depth)})[{self.pick(0, 1, -1, 9)}]", lambda: f"({o('list', depth)})|{self.pick('first', 'last')}",
            lambda: f"({o('dict', depth)}).get({self.literal()}{self.pick('', ', 1')})", lambda: f"{o('any', depth)} or {o('any', depth)}",
            lambda: f"({o('any', depth)}).{self.pick('x', 'y', 'role')}", lambda: "range(3)", lambda: f"({o('any', depth)}, )", lambda: "()",
            lambda: f"({o('any', depth)} if {o('bool', depth)})", lambda: f"{o('any', depth)} and {o('any', depth)}",
        ])()

    # ---- statements ----

    def tag(self, inside):
        left, right = self.pick("{%", "{%", "{%-", "{%+"), self.pick("%}", "%}", "-%}", "+%}")
        return f"{left} {inside} {right}"

    def text(self):
        return "".join(self.pick(" ", "\n", "  ", "a", "\n\n", "\t", "b.", "", "", "x\n", "\r\n", "{", "%", "#", "}}", " ")
                       for _ in range(self.rng.randint(0, 3)))

    def body(self, depth, loop):
        return "".join(self.text() + self.statement(depth, loop) for _ in range(self.rng.randint(1, 3))) + self.text()

    def statement(self, depth, loop):
        rng, size = self.rng, self.rng.randint(1, 3)
        name = self.pick("a", "b", "x", "s", "i")
        options = [lambda: f"{self.pick('{{', '{{-', '{{+')} {self.of('any', size)} {self.pick('}}', '}}', '-}}')}"] * 4 + [
            lambda: self.tag(f"set {name} = {self.of('any', size)}"), lambda: self.tag(f"set ns.a = {self.of('any', size)}"),
            lambda: self.pick("{#", "{#-") + " note " + self.pick("#}", "-#}", "+#}"),
            lambda: self.tag(f"set {name}, b = {self.of('any', 1)}, {self.of('int', 1)}")]
        if loop and rng.random() < 0.3:
            options += [lambda: self.tag(f"if {self.of('bool', 1)}") + self.tag(self.pick("break", "continue")) + self.tag("endif"),
                        lambda: "{{ loop." + self.pick("index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem",
                                                         "depth") + " }}"] * 3
        if depth > 0:
            options += [lambda: self.conditional(depth - 1, loop), lambda: self.loop(depth - 1), lambda: self.loop(depth - 1),
            lambda: self.block(depth - 1, loop)]
        return rng.choice(options)()

    def conditional(self, depth, loop):
        parts = [self.tag(f"if {self.of('any', 2)}"), self.body(depth, loop)]
        if self.rng.random() < 0.3:
            parts += [self.tag(f"elif {self.of('bool', 2)}"), self.body(depth, loop)]
        if self.rng.random() < 0.5:
            parts += [self.tag("else"), self.body(depth, loop)]
        return "".join(parts) + self.tag("endif")

    def loop(self, depth):
        target, source = self.pick(("m", "messages"), ("x", self.of("list", 2)), ("k, v", f"({self.of('dict', 1)}).items()"), ("k, v", "d|items"),
                                   ("s", self.of("string", 1)))
        condition = f" if {self.pick(self.of('bool', 1), 'ns.a', target.split(',')[0] + ' is string')}" if self.rng.random() < 0.3 else ""
        rest = self.tag("else") + self.body(depth, False) if self.rng.random() < 0.3 else ""
        return self.tag(f"for {target} in {source}{condition}") + self.body(depth, True) + rest + self.tag("endfor")

    def block(self, depth, loop):
        return self.rng.choice([
            lambda: self.tag("set a") + self.body(depth, False) + self.tag("endset") + "{{ a }}",
            lambda: self.tag("set b | upper | trim") + self.body(depth, False) + self.tag("endset"),
            lambda: self.tag(f"macro mac(p, q={self.of('any', 1)})") + self.body(depth, False) + "{{ p }}{{ q }}" + self.tag("endmacro") +
            f"{{{{ mac({self.of('any', 1)}{self.pick('', ', 2', ', q=3')}) }}}}",
            lambda: self.tag(f"with x = {self.of('any', 1)}, y = x") + self.body(depth, loop) + "{{ y }}" + self.tag("endwith"),
            lambda: self.tag(f"filter {self.pick('upper', 'trim', 'indent(2)', 'length', 'replace(1, 2)')}") + self.body(depth, False) + self.tag("endfilter"),
            lambda: self.tag("raw") + self.pick("{{ x }}", " {% if %}", "text\n", "") + self.tag("endraw"),
        ])()

    def template(self):
        if self.rng.random() < 0.4:
            return "{{ " + self.of("any", self.rng.randint(1, 4)) + " }}"
        return "{% set ns = namespace(a=1) %}" + self.body(self.rng.randint(1, 3), False)


def mutated(rng, sources):
    text = rng.choice(sources)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice([1, 1, 1, 3, 8]))
        piece = rng.choice(["", "", "{{", "}}", "{%", "%}", "-", "'", '"', "(", ")", "[", "]", "|", ".", " ", "\n", "if", "else", "in", "not",
                            "1", ",", "=", "{#", "#}", "none", "+", rng.choice(sources)[at:at + 12]])
        text = text[:at] + piece + text[end if rng.random() < 0.6 else at:]
    return text


def oracle(options):
    import warnings
    warnings.simplefilter("ignore")
    rng = random.Random(options.seed)
    grammar, sources = Grammar(rng), list(templates().values())
    requests = []
    for index in range(options.count):
        template = mutated(rng, sources) if index % 5 == 4 else grammar.template()
        requests.append({"template": template, "messages": MESSAGES, "variables": VARIABLES, "tokens": TOKENS, "date": DATE, "tools": None,
                         "documents": None, "add_generation_prompt": index % 2 == 0})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(request, ensure_ascii=False) + "\n")
        file.seek(0)
        answers = subprocess.run([options.program, "--render"], stdin=file, capture_output=True, text=True, check=True).stdout.splitlines()
    kinds, differences = collections.Counter(), 0
    reasons = collections.Counter()
    for request, line in zip(requests, answers, strict=True):
        answer = json.loads(line)
        text, why = render(request["template"], MESSAGES, variables=VARIABLES, add_generation_prompt=request["add_generation_prompt"])
        if why is BROKEN:
            kinds["compiled wrongly by Jinja"] += 1
        elif text is not None and text == answer.get("text"):
            kinds["equal"] += 1
        elif text is None and "error" in answer:
            kinds["refused by both"] += 1
        elif "error" in answer and ("there is no filter" in answer["error"] or "there is no test" in answer["error"]):
            kinds["unknown name refused when loaded"] += 1  # Jinja notices in a branch only when it is executed
        elif "error" in answer and "not implemented" in answer["error"]:
            kinds["not implemented"] += 1
            reasons[answer["error"].split(": ", 1)[1]] += 1
        else:
            differences += 1
            if differences <= options.show:
                print(f"{json.dumps(request['template'], ensure_ascii=False)}\n  expected {text!r}\n  found    {answer}")
    for reason, count in reasons.most_common(options.reasons):
        print(f"  {count:5d} {reason}")
    print(f"{options.count} templates, seed {options.seed}: {dict(kinds)}, {differences} differences")
    return 1 if differences else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("golden")
    compare = commands.add_parser("oracle")
    compare.add_argument("--program", default="build/release/tests/unit/test_chat")
    compare.add_argument("--count", type=int, default=5000)
    compare.add_argument("--seed", type=int, default=1)
    compare.add_argument("--show", type=int, default=10, help="differences to print")
    compare.add_argument("--reasons", type=int, default=0, help="how many of what is not implemented to print")
    options = parser.parse_args()
    if options.command == "golden":
        return golden()
    return oracle(options)


if __name__ == "__main__":
    sys.exit(main())
