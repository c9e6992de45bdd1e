"""A kernel's source, rewritten to run a warp at a time: every variable holds a value a lane.

Arithmetic needs no rewriting, NumPy does 32 lanes at once. What a lane decides by itself does::

    if row < n:                      if _flow.enter(row < n):      # some lane goes in
        x = y             becomes        x = _flow.put(y, x)       # and only those change x
                                     _flow.leave()

`flow.Flow` keeps the mask of the lanes that are active. Loops, ``break``, ``continue``, ``return``,
``and``, ``or``, ``not`` and conditional expressions go the same way. Line numbers stay those of the
kernel's file, so that faults and tracebacks point there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any

FLOW = "_flow"
REFUSED = (
    ast.Try, ast.With, ast.Match, ast.Assert, ast.Raise, ast.Global, ast.Nonlocal, ast.NamedExpr,
    ast.Yield, ast.YieldFrom, ast.Await, ast.ClassDef, ast.AsyncFunctionDef,
)  # fmt: skip

_codes: dict[tuple[str, CodeType], CodeType] = {}


def warp_code(function: FunctionType) -> CodeType:
    """Compile the rewritten ``def``. Executing it defines the function under its own name.

    Once for all functions of one ``def``, whatever their closures hold.
    """
    place = function.__code__.co_filename, function.__code__
    if place not in _codes:
        _codes[place] = _rewritten(function)
    return _codes[place]


def _rewritten(function: FunctionType) -> CodeType:
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        lines, first = ["None"], 1
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"kernel: {function.__qualname__} must be a def with its source in a file")
    definition.decorator_list = []
    for node in ast.walk(tree):
        loop = isinstance(node, ast.For | ast.While) and node.orelse
        if loop or isinstance(node, REFUSED):
            what = "a loop's else" if loop else type(node).__name__
            line = getattr(node, "lineno", 1) + first - 1
            raise TypeError(f"kernel: line {line} of {function.__qualname__}: {what} not emulated")
    _Rewriter().visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first - 1)
    return compile(tree, function.__code__.co_filename, "exec")


def names_of(function: FunctionType) -> dict[str, Any]:
    """What its free names mean: globals and closure."""
    names = dict(function.__globals__)
    closure = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
        names[name] = cell.cell_contents
    return names


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    target = ast.Attribute(ast.Name(FLOW, ast.Load()), method, ast.Load())
    return ast.Call(target, list(arguments), [])


def _later(value: ast.expr) -> ast.Lambda:
    """``lambda: value``: evaluated only if needed."""
    nothing = ast.arguments([], [], None, [], [], None, [])
    return ast.Lambda(nothing, value)


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.conditional = False  # inside an if or a loop: assignments keep to the active lanes
        self.loops = 0
        self.loop: list[str | None] = []  # the enclosing loops' names; None: a plain for

    # ---- functions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        inner = _Rewriter()
        locals_ = _assigned(node) - {x.arg for x in node.args.args}
        body = inner._body(node.body)
        start: list[ast.stmt] = [
            ast.Assign([ast.Name(name, ast.Store())], ast.Attribute(
                ast.Name(FLOW, ast.Load()), "unset", ast.Load()))
            for name in sorted(locals_)
        ]  # fmt: skip
        start.append(ast.Assign([ast.Name("_frame", ast.Store())], _call("call")))
        end = ast.Return(_call("finish", ast.Name("_frame", ast.Load())))
        node.body = [*start, *body, end]
        for statement in (*start, end):
            ast.copy_location(statement, node)
        return node

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        value = self.visit(node.value) if node.value else ast.Constant(None)
        frame = ast.Name("_frame", ast.Load())
        return self._escape(node, _call("give", frame, value), ast.Return(_call("finish", frame)))

    # ---- branches and loops

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        test = self.visit(node.test)
        with_mask: list[ast.stmt] = [ast.If(_call("enter", test), self._inside(node.body), [])]
        if node.orelse:
            with_mask.append(ast.If(_call("otherwise"), self._inside(node.orelse), []))
        with_mask.append(ast.Expr(_call("leave")))
        return [ast.copy_location(statement, node) for statement in with_mask]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        name = self._open_loop()
        loop = ast.Name(name, ast.Load())
        test = ast.BoolOp(
            ast.And(), [_call("again", loop), _call("keep", loop, self.visit(node.test))]
        )
        return self._close_loop(node, name, ast.While(test, self._inside(node.body), []))

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        items = self.visit(node.iter)
        if not _leaves(node.body):
            self.loop.append(None)
            plain = ast.For(node.target, _call("each", items), self._inside(node.body), [])
            self.loop.pop()
            return [ast.copy_location(plain, node)]
        name = self._open_loop()
        loop = ast.Name(name, ast.Load())
        each = ast.For(node.target, _call("iterate", loop, items), self._inside(node.body), [])
        return self._close_loop(node, name, each)

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        return self._escape(node, _call("stop", self._loop_name()), ast.Break())

    def visit_Continue(self, node: ast.Continue) -> list[ast.stmt]:
        return self._escape(node, _call("skip", self._loop_name()), ast.Continue())

    # ---- assignments

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return node
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Assign(self, node: ast.Assign) -> Any:
        if len(node.targets) > 1:  # a = b = x
            each = [ast.Assign([ast.Name("_value", ast.Store())], node.value)]
            each += [ast.Assign([x], ast.Name("_value", ast.Load())) for x in node.targets]
            return [self.visit_Assign(ast.copy_location(x, node)) for x in each]
        node.value = self.visit(node.value)
        node.targets = [self.visit(target) for target in node.targets]
        if not self.conditional:
            return node
        target = node.targets[0]
        if isinstance(target, ast.Name):
            node.value = _call("put", node.value, _old(target))
        elif isinstance(target, ast.Tuple):
            node.value = _call("put", node.value, _old_values(target))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """``x += y`` as ``x = x + y``: NumPy's own would change an array that others hold."""
        source = _as_load(node.target)
        plain = ast.Assign([node.target], ast.BinOp(source, node.op, node.value))
        return self.visit_Assign(ast.copy_location(plain, node))

    # ---- expressions

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        method = "both" if isinstance(node.op, ast.And) else "either"
        *rest, value = [self.visit(x) for x in node.values]
        for earlier in reversed(rest):
            value = _call(method, earlier, _later(value))
        return ast.copy_location(value, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        node.operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ast.copy_location(_call("negate", node.operand), node)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test, yes, no = (self.visit(x) for x in (node.test, node.body, node.orelse))
        return ast.copy_location(_call("choose", test, _later(yes), _later(no)), node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        operands = [self.visit(x) for x in (node.left, *node.comparators)]
        if len(node.ops) == 1:
            node.left, node.comparators = operands[0], operands[1:]
            return node
        pairs = zip(operands, node.ops, operands[1:], strict=False)
        *rest, value = [ast.Compare(a, [op], [b]) for a, op, b in pairs]
        for earlier in reversed(rest):
            value = _call("both", earlier, _later(value))
        return ast.copy_location(value, node)

    # ---- the same for all

    def _body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        rewritten: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            rewritten += result if isinstance(result, list) else [result]
        return rewritten

    def _inside(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        outside, self.conditional = self.conditional, True
        rewritten = self._body(statements)
        self.conditional = outside
        return rewritten

    def _escape(self, node: ast.stmt, leaves: ast.expr, statement: ast.stmt) -> list[ast.stmt]:
        """Lanes leave; Python's own statement runs once none is left."""
        return [ast.copy_location(ast.If(leaves, [statement], []), node)]

    def _open_loop(self) -> str:
        self.loops += 1
        self.loop.append(f"_loop{self.loops}")
        return f"_loop{self.loops}"

    def _close_loop(self, node: ast.stmt, name: str, loop: ast.stmt) -> list[ast.stmt]:
        self.loop.pop()
        before = ast.Assign([ast.Name(name, ast.Store())], _call("loop"))
        after = ast.Expr(_call("end", ast.Name(name, ast.Load())))
        return [ast.copy_location(statement, node) for statement in (before, loop, after)]

    def _loop_name(self) -> ast.Name:
        name = self.loop[-1]
        assert name is not None
        return ast.Name(name, ast.Load())


def _old_values(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Tuple):
        return ast.Tuple([_old_values(x) for x in target.elts], ast.Load())
    return _old(target) if isinstance(target, ast.Name) else ast.Constant(None)


def _old(name: ast.Name) -> ast.Name:
    return ast.Name(name.id, ast.Load())


def _as_load(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return _old(target)
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())


def _assigned(node: ast.FunctionDef) -> set[str]:
    """Names that the function itself assigns, not those of functions inside it."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.FunctionDef):
            continue
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        waiting += ast.iter_child_nodes(part)
    return names


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a break or continue in this body is the loop's own."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.Break | ast.Continue):
            return True
        if not isinstance(part, ast.For | ast.While | ast.FunctionDef):
            waiting += ast.iter_child_nodes(part)
    return False
