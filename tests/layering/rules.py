"""The rules. Each takes the files and yields sentences, each beginning with file:line."""

import ast
import gc
import re
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from tests.layering import layers
from tests.layering.source import PACKAGE, imports, part_of, read_tree, walk

MUTATORS = frozenset(
    {
        "append",
        "extend",
        "insert",
        "add",
        "update",
        "setdefault",
        "pop",
        "popitem",
        "remove",
        "discard",
        "clear",
        "sort",
    }
)

# A path of the package in backquotes: `comm.group`, `parallel/data.py`,
# `nnmpi.comm.mesh.Mesh.shape`, `optim.clip.scale()`.
QUOTED = re.compile(r"`(?:nnmpi[./])?([a-z_]+(?:[./][A-Za-z_]\w*)+)(?:\(\))?`")
UNQUOTED = re.compile(r"(?<![\w.`/-])(?:nnmpi\.)?([a-z_]+(?:\.[A-Za-z_]\w*)+)")


# An option as it is typed, and not an arrow or a word with dashes in it.
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![a-z-])")


class Tree:
    """All files of the package, with what they import."""

    def __init__(self, root):
        self.sources = read_tree(root)
        self.packages = frozenset(source.module for source in self.sources if source.is_init)
        self.modules = {source.module: source for source in self.sources}

    @cached_property
    def imports(self):
        """What each file imports."""
        modules = frozenset(self.modules)
        return {source.path: imports(source, modules) for source in self.sources}

    def each_import(self):
        """Yield every import with its file."""
        for source in self.sources:
            for result in self.imports[source.path]:
                yield source, result


def violations(root):
    """Return every breach of a rule by the package under `root`."""
    collects = gc.isenabled()
    gc.disable()  # it would visit a million nodes again and again, which all stay
    try:
        tree = Tree(root)
        return [sentence for rule in RULES for sentence in rule(tree)]
    finally:
        if collects:
            gc.enable()


def lower_layers_only(tree):
    """A module imports only lower layers; the parts of one layer do not import one another."""
    for source in tree.sources:
        if source.part and source.part not in layers.LAYER_OF:
            yield (
                f"{source.path}:1: {source.part} is in no layer; add it to tests/layering/layers.py"
            )
    for source, result in _inside(tree):
        local, other = source.part, part_of(result.target)
        if (
            local == other
            or not local
            or local not in layers.LAYER_OF
            or other not in layers.LAYER_OF
        ):
            continue
        mine, theirs = layers.LAYER_OF[local], layers.LAYER_OF[other]
        where = (
            f"{source.path}:{result.line}: {local} (layer {mine}) imports {result.target} (layer"
            f" {theirs})"
        )
        if theirs > mine:
            yield f"{where}; a module imports only lower layers"
        elif theirs == mine > 0:
            yield f"{where}; the parts of one layer do not import one another"
        elif other in layers.STRANGERS.get(local, ()):
            yield f"{where}; {local} must not know {other}"


def wings_unknown(tree):
    """The core names no wing in a string: a path or a module to import."""
    wings = "|".join(sorted(layers.WINGS))
    named = re.compile(rf"(?<![\w.-])(?:{PACKAGE}[./])?(?:{wings})[./](?![\s./]|$)")
    for source in tree.sources:
        if source.part in layers.WINGS or source.path in layers.DOORS:
            continue
        for node in source.strings:
            if found := named.search(node.value):
                yield (
                    f"{source.path}:{node.lineno}: names {found.group()}, a wing; base/wings.py and"
                    " commands/table.py alone do"
                )


def strategies_apart(tree):
    """No parallel strategy imports another, unless it is a variant of that one."""
    for source, result in _inside(tree):
        local, other = (_strategy_of(module) for module in (source.module, result.target))
        if local and other and other not in layers.VARIANTS.get(local, {local}):
            yield (
                f"{source.path}:{result.line}: one strategy imports another, {result.target}; use a"
                " third file"
            )


def _strategy_of(module):
    """Return the strategy that a module is or belongs to, else an empty string."""
    name = ".".join(module.split(".")[2:3]) * module.startswith(f"{PACKAGE}.parallel.")
    return name if name in layers.STRATEGIES else ""


ANSWERS = f"{PACKAGE}.base.words"  # what a package says about a name that it lacks


def defining_module(tree):
    """Inside the package the module that defines a name is imported, never a package's
    `__init__`.
    """
    for source, result in _inside(tree):
        if result.target in tree.packages and source.module != PACKAGE:
            yield (
                f"{source.path}:{result.line}: imports the package {result.target}; import the"
                " module that defines it"
            )
        elif (
            source.is_init
            and source.part
            and not result.target.startswith((f"{source.module}.", ANSWERS))
        ):
            yield (
                f"{source.path}:{result.line}: an __init__ exports only its own package, not"
                f" {result.target}"
            )


def libraries_at_home(tree):
    """mpi4py only in comm/mpi, cupy only in backend; pickle nowhere."""
    for source, result in tree.each_import():
        library = result.target.partition(".")[0]
        home = layers.HOMES.get(library)
        if home is not None and not source.path.startswith(f"{PACKAGE}/{home}/"):
            yield f"{source.path}:{result.line}: imports {library}, which only {home}/ may"
        if library in layers.PICKLES and source.path not in layers.PICKLERS:
            yield (
                f"{source.path}:{result.line}: imports {library}; nothing is pickled, in files or"
                " messages"
            )


def one_writer_of_json(tree):
    """base/files.py writes and reads JSON, without NaN; messages between ranks may have it."""
    for source in tree.sources:
        for node in source.nodes:
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "json"
                and source.path not in layers.WRITE_JSON
            ):
                yield f"{source.path}:{node.lineno}: json.{node.attr}; base/files.py has json_text"


def imports_on_top(tree):
    """Imports stand at the top of the file, except of optional libraries."""
    for source, result in tree.each_import():
        is_optional = result.target.partition(".")[0] in layers.OPTIONAL
        if (
            result.is_late
            and not is_optional
            and (source.path, result.target) not in layers.LATE_IMPORTS
        ):
            yield (
                f"{source.path}:{result.line}: imports {result.target} inside a function; only"
                " optional libraries are"
            )


def options_in_train(tree):
    """Library modules name arguments; only modules that read the command line speak of `--options`.

    Docstrings may show a command as an example.
    """
    for source in tree.sources:
        for node in [] if _may_talk(source) else source.strings:
            for flag in FLAG.findall(node.value):
                if flag not in layers.FOREIGN_FLAGS:
                    yield (
                        f"{source.path}:{node.lineno}: speaks of {flag}; name the argument here,"
                        " the option in train/"
                    )


def no_shared_state(tree):
    """No list or dictionary of a module that its functions change."""
    for source in tree.sources:
        names = {name for node in source.tree.body for name in _assigned(node)}
        functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef)]
        for function in functions if names else []:
            inside = walk(function)
            local = {name for node in inside for name in _assigned(node)}
            for line, name in _changes(inside):
                if name in names - local:
                    yield (
                        f"{source.path}:{line}: changes the module's {name}; no state is kept in"
                        " modules"
                    )


def documented(tree):
    """Every module, and every public class, function and method, has a docstring."""
    for source in tree.sources:
        if ast.get_docstring(source.tree) is None:
            yield f"{source.path}:1: the module has no docstring"
        for owner in [
            source.tree,
            *(node for node in source.tree.body if isinstance(node, ast.ClassDef)),
        ]:
            for node in owner.body if not getattr(owner, "name", "").startswith("_") else []:
                bases = {getattr(base, "id", "") for base in getattr(owner, "bases", [])}
                inherited = bases and (
                    getattr(node, "name", "") in layers.INHERITED or bases & layers.EXPLAINED
                )
                if _needs_docstring(node) and not inherited and ast.get_docstring(node) is None:
                    yield f"{source.path}:{node.lineno}: {node.name} has no docstring"


def packages_describe_files(tree):
    """A package's `__init__` names each of its modules, so that a reader finds them there."""
    for source in tree.sources:
        package, _, name = source.module.rpartition(".")
        if source.is_init or package in ("", PACKAGE) or name.startswith("__"):
            continue
        text = tree.modules[package].text
        if not re.search(rf"\b{name}\b", text):
            yield f"{source.path}:1: the `__init__` of {package} does not say what {name} is for"


def one_meaning(tree):
    """A name of a class or of an alias of a type stands in one file."""
    result = {}
    for source in tree.sources:
        for node in source.nodes:
            is_class = isinstance(node, ast.ClassDef) and node in source.tree.body
            for name in [node.name] if is_class else _aliases(node):
                result.setdefault(name, []).append(f"{source.path}:{node.lineno}")
    for name, places in result.items():
        if len(places) > 1:
            yield f"{places[-1]}: {name} is a type of {places[0]}, too; one name means one thing"


def _aliases(node):
    """Return the names of types that an assignment defines, in capitals and small letters."""
    if type(node) not in (ast.Assign, ast.AnnAssign) or isinstance(node.value, ast.Call):
        return set()  # a TypeVar, too, has no meaning
    return {name for name in _assigned(node) if re.fullmatch("[A-Z][a-z][A-Za-z]+", name)}


def references_exist(tree):
    """What docstrings and comments name in backquotes, and maps without, is a module, or a name in
    one.
    """
    for source in tree.sources:
        yield from dead_references(tree, source.path, source.text)
        written = ast.get_docstring(source.tree) or ""
        for result in UNQUOTED.finditer(written):
            if not refers(tree, result[1]):
                yield f"{source.path}:1: names {result[0]}, which does not exist"


def dead_references(tree, path, text):
    """Yield a sentence for each path of the package in backquotes that leads nowhere."""
    for result in QUOTED.finditer(text):
        if not refers(tree, result[1]):
            line = text[: result.start()].count("\n") + 1
            yield f"{path}:{line}: names {result[0]}, which does not exist"


def refers(tree, words):
    """Return whether words like "comm.world.Comm" lead to a module or a name in it; also if they
    are no path at all.
    """
    module, names = PACKAGE, re.split("[./]", words.removesuffix(".py"))
    if f"{module}.{names[0]}" not in tree.modules or names[-1] in ("csv", "jsonl"):
        # a user's train.csv is no module, nor is a run's metrics.jsonl
        return True
    while names and f"{module}.{names[0]}" in tree.modules:
        module = f"{module}.{names.pop(0)}"
    return not names or names[0] in _defined(tree, module)


def _defined(modules, module):
    """Return the names that a module has: classes, functions, values and what it imports."""
    tree = modules.modules[module].tree
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
            if "*" in names:
                names = names - {"*"} | _defined(modules, str(getattr(node, "module", "")))
        names |= _assigned(node)
    return names


def no_cycles(tree):
    """No modules that import one another, be it in a function or for types."""
    edges = {source.module: set() for source in tree.sources}
    for source, result in _inside(tree):
        if source.module not in (PACKAGE, result.target):
            edges[source.module].add(result.target)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]
        yield f"{tree.modules[cycle[0]].path}:1: imports itself in a circle: {' -> '.join(cycle)}"


RULES = (
    lower_layers_only,
    wings_unknown,
    strategies_apart,
    defining_module,
    libraries_at_home,
    one_writer_of_json,
    imports_on_top,
    options_in_train,
    no_shared_state,
    documented,
    packages_describe_files,
    one_meaning,
    references_exist,
    no_cycles,
)


def _inside(tree):
    """Yield the imports of the package's own modules."""
    return ((source, result) for source, result in tree.each_import() if _is_inside(result))


def _is_inside(found):
    return found.target == PACKAGE or found.target.startswith(f"{PACKAGE}.")


def _may_talk(source):
    """Return whether a module is of a command."""
    is_above = layers.LAYER_OF.get(source.part, 0) >= layers.LAYER_OF["train"]
    return is_above or source.module in layers.SPEAKERS or source.module.endswith("__main__")


def _needs_docstring(node):
    """Whether this is public; setters and overloads are explained where they are first defined."""
    if not isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) or node.name.startswith("_"):
        return False
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return not any(name.endswith((".setter", "overload", "override")) for name in decorators)


def _assigned(node):
    """Return the names that a statement binds."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    bound = [item for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)]
    return {item.id for item in bound if isinstance(item.ctx, ast.Store)}


def _changes(nodes):
    """Yield line and name of everything that a function changes in place: x[i] = ..., x += ...,
    x.append(...).
    """
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
        ):
            yield node.lineno, ast.unparse(node.func.value)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node.lineno, ast.unparse(node.value)
