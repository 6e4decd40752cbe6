"""Groups of options: dataclasses whose values pydantic checks by the types of their fields.

    @options("duplicates")
    class DuplicatesConfig:
        threshold: Annotated[float, Gt(0), Le(1)] = 0.98
        \"\"\"Smallest cosine that links two rows; linked rows form a group.\"\"\"

The sentence below a field is its help and its documentation. What types cannot say is checked in
`__post_init__`, which raises a ConfigError.
"""

from __future__ import annotations

import functools
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate

from featx.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

MAY_BE_EMPTY = "an empty text is a value"
"""Annotates an option that may be an empty text; for all others that is an error."""


def _differ(values: list[object]) -> bool:
    return all(values.count(each) == 1 for each in values)


Count = Annotated[int, Ge(1)]
NaturalNumber = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), Lt(float("inf"))]
NonNegative = Annotated[float, Ge(0), Lt(float("inf"))]
Share = Annotated[float, Gt(0), Lt(1), "a share between 0 and 1"]
OneOrMore = Union[T, Annotated[list[T], MinLen(1), Predicate(_differ)]]  # noqa: UP007
"""One value, or a list of different values."""


@dataclass(frozen=True)
class OnlyWith:
    """Annotates an option that has an effect only with some values of another one of its group,
    which must have or contain one of `values`, or any value if there are none.

    `k: Annotated[Count | None, OnlyWith("method", "knn")] = None`
    """

    option: str
    values: tuple[str, ...]

    def __init__(self, option: str, *values: str) -> None:
        object.__setattr__(self, "option", option)
        object.__setattr__(self, "values", values)

    def holds(self, group: object) -> bool:
        """Return whether the condition holds for the options of the group."""
        given = getattr(group, self.option)
        if not self.values:
            return given not in (None, "", (), [])
        return bool(set(self.values) & set(names_tuple(given)))


@dataclass_transform(field_specifiers=(field,), frozen_default=True)
def options(group: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class of options a frozen dataclass, which checks its values:
    an instance raises a ConfigError for a value that does not have the type of its field, and for
    an option that differs from its default without effect. `group` is the dotted name of the group
    for messages, such as 'probe'; '' for the top.
    """

    def decorate(cls: type[T]) -> type[T]:
        resolved = get_type_hints(cls, include_extras=True)
        inherited: Mapping[str, object] = getattr(cls, "option_hints", {})
        hints = {**inherited, **{name: resolved[name] for name in cls.__annotations__}}
        check_together = getattr(cls, "__post_init__", None)

        def check(self: Any) -> None:
            is_whole = type(self) is cls  # a subclass checks its instances itself
            if is_whole:
                _check_types(group, self)
            if check_together is not None:
                check_together(self)
            if is_whole:
                _check_effects(group, self)

        made: Any = cls
        made.__post_init__ = check
        made = dataclass(frozen=True)(made)
        made.option_hints = types.MappingProxyType({f.name: hints[f.name] for f in fields(made)})
        return made  # type: ignore[no-any-return]

    return decorate


def _check_types(group: str, values: Any) -> None:
    """Check the values of all options that differ from their defaults; pydantic may convert one."""
    for f in fields(values):
        value, hint = getattr(values, f.name), hints_of(type(values))[f.name]
        if hasattr(value, "tolist"):  # a number of numpy, an array
            value = value.tolist()
            object.__setattr__(values, f.name, value)
        elif isinstance(value, os.PathLike):
            value = str(os.fspath(value))
            object.__setattr__(values, f.name, value)
        elif type(value).__module__ == "torch":  # a device or a dtype
            value = str(value).removeprefix("torch.")
            object.__setattr__(values, f.name, value)
        if is_default(f, value):
            continue
        if is_dataclass(hint):
            if not isinstance(value, hint):  # type: ignore[arg-type]  # a class
                raise not_options(f"{group}.{f.name}".lstrip("."), value, fields(hint)[0].name)
            continue
        checked = _checked(f"{group}.{f.name}".lstrip("."), value, type(values), f.name)
        object.__setattr__(values, f.name, checked)


def not_options(name: str, value: object, option: str) -> ConfigError:
    """Return the error for a value of a group of options; `option` is one of them."""
    return ConfigError(
        f"{name}={shown(value)}: {name} is a group of options. Give one of them, such as "
        f"{name}.{option}=VALUE; python -m featx --help {name} lists them."
    )


def _checked(key: str, value: Any, cls: type, name: str) -> object:
    """Return the value of an option as its type has it."""
    from pydantic import ValidationError  # 70 ms, which a command without such options saves

    try:
        return _validator(cls, name).validate_python(value)
    except ValidationError as error:
        kinds = {each["type"] for each in error.errors()}
    if "predicate_failed" in kinds and isinstance(value, list):
        raise ConfigError(f"{key}={shown(value)}: a value is repeated.")
    hint = hints_of(cls)[name]
    if value == []:
        raise ConfigError(f"{key} is empty: expected {in_words(hint)}.")
    if choices := choices_of(hint):
        given = value if isinstance(value, list | tuple) else [value]
        wrong = [each for each in given if each not in choices]
        near = nearest(wrong[0], choices) if wrong and isinstance(wrong[0], str) else ""
        some = "some" if any(_is_list(part) for part in alternatives(hint)) else "one"
        raise ConfigError(f"{key}={shown(value)}: expected {some} of {', '.join(choices)}.{near}")
    raise ConfigError(f"{key}={shown(value)}: expected {in_words(hint)}.")


@functools.cache
def _validator(cls: type, name: str) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hints_of(cls)[name], config=ConfigDict(strict=True))


def _check_effects(group: str, values: Any) -> None:
    """Refuse options that differ from their defaults and have no effect, and empty texts."""
    for f in fields(values):
        value, marks = getattr(values, f.name), marks_of(hints_of(type(values))[f.name])
        if is_default(f, value):
            continue
        if value == "" and MAY_BE_EMPTY not in marks:  # an empty path would be the current folder
            name = f"{group}.{f.name}".lstrip(".")
            raise ConfigError(f"{name} is empty: give a value, or leave {name} out.")
        for condition in marks:
            if isinstance(condition, OnlyWith) and not condition.holds(values):
                of = f"={' or '.join(condition.values)}" if condition.values else ""
                raise ConfigError(
                    f"{group}.{f.name} has an effect with {group}.{condition.option}{of} only."
                )


def shown(value: object) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = str(value)
    # A torch module is printed with all its layers.
    return text if isinstance(value, str) or "\n" not in text else type(value).__name__


# Types of options


def hints_of(cls: type) -> Mapping[str, Any]:
    """Return the types of the fields of a group, with their annotations."""
    hints: Mapping[str, Any] = cls.option_hints  # type: ignore[attr-defined]  # made by `options`
    return hints


def default_of_field(f: Field[Any]) -> object:
    """Return the default of a field; MISSING if it has none."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def is_default(f: Field[Any], value: object) -> bool:
    """Return whether a field has its default, of the same type: 1 is neither 1.0 nor true."""
    default = default_of_field(f)
    return type(value) is type(default) and bool(value == default)


def marks_of(hint: Any) -> tuple[object, ...]:
    """Return the annotations of a type."""
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def alternatives(hint: object) -> list[object]:
    """Return the types of a union, without annotations around it."""
    if get_origin(hint) is Annotated:
        inner = get_args(hint)[0]
        return alternatives(inner) if get_origin(inner) in (Union, types.UnionType) else [hint]
    if get_origin(hint) in (Union, types.UnionType):
        return [part for each in get_args(hint) for part in alternatives(each)]
    return [hint]


def choices_of(hint: object) -> tuple[str, ...]:
    """Return the values of an option that is one of some texts, a list of them, or null.

    It is empty for other options.
    """
    parts = [without_marks(part) for part in alternatives(hint) if part is not type(None)]
    parts = [get_args(without_marks(part))[0] if _is_list(part) else part for part in parts]
    if not parts or not all(get_origin(part) is Literal for part in parts):
        return ()
    return tuple(dict.fromkeys(value for part in parts for value in get_args(part)))


def _is_list(hint: object) -> bool:
    return get_origin(without_marks(hint)) is list


def without_marks(hint: object) -> object:
    """Return a type without the annotations around it."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping, such as {depth: 20}",
    type(None): "null",
}

_BOUNDS = {Ge: "of at least", Gt: "above", Le: "of at most", Lt: "below"}


def in_words(hint: Any) -> str:
    """Return the values of a type in words; an annotation that is a text says them itself."""
    texts = [mark for mark in marks_of(hint) if isinstance(mark, str) and mark != MAY_BE_EMPTY]
    if texts:
        return texts[0]
    parts = alternatives(hint)
    if len(parts) > 1:
        each_in_words = [in_words(part) for part in parts]
        lists = {f"a list of {each}": "a list of them" for each in each_in_words}
        return ", or ".join(dict.fromkeys(lists.get(each, each) for each in each_in_words))
    (hint,) = parts
    if get_origin(hint) is Annotated:
        return in_words(get_args(hint)[0]) + _bounds_in_words(marks_of(hint))
    if get_origin(hint) is Literal:
        *others, last = map(str, get_args(hint))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(hint) is list:
        (element,) = get_args(hint)
        inner = in_words(element)
        words, count = re.subn(r"^a (text|whole number|number)", r"\1s", inner)
        return f"a list of {words}" if count else f"a list of {inner}"
    return _WORDS[get_origin(hint) or hint]


def _bounds_in_words(marks: Sequence[object]) -> str:
    """Return the bounds of a number in words: ' of at least 1'."""
    bounds = {type(mark): getattr(mark, type(mark).__name__.lower()) for mark in marks
              if type(mark) in _BOUNDS}  # fmt: skip
    finite = {kind: bound for kind, bound in bounds.items() if abs(bound) != float("inf")}
    if Ge in finite and Le in finite:
        return f" from {finite[Ge]} to {finite[Le]}"
    words = [f"{_BOUNDS[kind]} {bound}" for kind, bound in finite.items()]
    return f" {' and '.join(words)}" if words else ""


def check_choice(key: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError unless an option has one of its values."""
    if value not in choices:
        near = nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}.{near}")


def names_tuple(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return an option that is a text or a list of texts as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def is_group(value: object) -> bool:
    """Return whether a value is the options of a group."""
    return is_dataclass(value) and not isinstance(value, type)


def column_name_problem(names: list[str]) -> str | None:
    """Return why columns cannot have these names in a store, or None if they can."""
    for name in names:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            return f"a column cannot be called {name!r} in a store; give it a name without '/'."
        if names.count(name) > 1:
            return f"{name} is named twice."
    return None
