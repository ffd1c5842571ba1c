"""Scripts for shells. Each finds out which command a line is at, and offers what may follow."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from lora_serve.cli.completion_tree import Flag, Place

BASH = """\
# Completion of lora-serve for bash; made by `lora-serve completion bash`.
_lora_serve() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} place="" words="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$place/${{COMP_WORDS[i]}}" in
      {places}) place="$place/${{COMP_WORDS[i]}}" ;;
    esac
  done
  COMPREPLY=()
  case "$place:$prev" in
{values}
  esac
  case "$place" in
{words}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  case "$place" in
    {paths})
      [[ $cur == -* ]] && return
      compopt -o filenames
      COMPREPLY+=($(compgen -f -- "$cur")) ;;
  esac
}}
complete -F _lora_serve lora-serve
"""
ZSH = """\
#compdef lora-serve
# Completion of lora-serve for zsh; made by `lora-serve completion zsh`.
_lora_serve() {{
  local place="" word prev=${{words[CURRENT-1]}}
  local -a flags commands
  for word in ${{words[2,CURRENT-1]}}; do
    case "$place/$word" in
      {places}) place="$place/$word" ;;
    esac
  done
  case "$place:$prev" in
{values}
  esac
  case "$place" in
{words}
  esac
  if [[ $PREFIX == -* ]]; then
    _describe -o flag flags
  else
    (( $#commands )) && _describe command commands
    case "$place" in
      {paths}) _files ;;
    esac
  fi
}}
if [[ ${{funcstack[1]}} == _lora_serve || ${{funcstack[1]}} == _lora-serve ]]; then
  _lora_serve "$@"
else
  compdef _lora_serve lora-serve
fi
"""
FISH = """\
# Completion of lora-serve for fish; made by `lora-serve completion fish`.
function __lora_serve_at
  set -l place ""
  set -l words (commandline -opc)
  for word in $words[2..-1]
    switch "$place/$word"
      case {places}
        set place "$place/$word"
    end
  end
  test "$place" = "$argv[1]"
end
complete -c lora-serve -f
{words}
"""


def bash_script(tree: Sequence[Place]) -> str:
    return BASH.format(
        places="|".join(_paths(tree)),
        values="\n".join(_bash_values(tree)),
        words="\n".join(
            f"    {shlex.quote(place.path)}) words={shlex.quote(' '.join(_words(place)))} ;;"
            for place in tree
        ),
        paths=_with_paths(tree),
    )


def _bash_values(tree: Sequence[Place]) -> Iterator[str]:
    for names, flag in _valued(tree):
        if flag.choices:
            words = shlex.quote(" ".join(flag.choices))
            act = f'COMPREPLY=($(compgen -W {words} -- "$cur")); return'
        elif flag.is_path:
            act = 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur")); return'
        else:
            act = "return"
        yield f"    {'|'.join(names)}) {act} ;;"


def zsh_script(tree: Sequence[Place]) -> str:
    return ZSH.format(
        places="|".join(_paths(tree)),
        values="\n".join(_zsh_values(tree)),
        words="\n".join(_zsh_words(place) for place in tree),
        paths=_with_paths(tree),
    )


def _zsh_values(tree: Sequence[Place]) -> Iterator[str]:
    for names, flag in _valued(tree):
        if flag.choices:
            act = f"compadd -- {' '.join(map(shlex.quote, flag.choices))}; return"
        else:
            act = "_files; return" if flag.is_path else "return"
        yield f"    {'|'.join(names)}) {act} ;;"


def _zsh_words(place: Place) -> str:
    flags = [(name, flag.help) for flag in place.flags for name in flag.names]
    commands = [*place.commands, *((choice, choice) for choice in place.choices)]
    return (
        f"    {shlex.quote(place.path)})\n"
        f"      flags=({_described(flags)})\n"
        f"      commands=({_described(commands)}) ;;"
    )


def _described(words: Sequence[tuple[str, str]]) -> str:
    return " ".join(shlex.quote(f"{word}:{help.replace(':', '-')}") for word, help in words)


def fish_script(tree: Sequence[Place]) -> str:
    lines = [line for place in tree for line in _fish_lines(place)]
    return FISH.format(places=" ".join(_paths(tree)), words="\n".join(lines))


def _fish_lines(place: Place) -> Iterator[str]:
    at = f"complete -c lora-serve -n '__lora_serve_at \"{place.path}\"'"
    for name, help in place.commands:
        yield f"{at} -a {name} -d {_fish_quoted(help)}"
    for choice in place.choices:
        yield f"{at} -a {choice}"
    if place.takes_paths:
        yield f"{at} -F"
    for flag in place.flags:
        yield f"{at} {_fish_flag(flag)} -d {_fish_quoted(flag.help)}"


def _fish_flag(flag: Flag) -> str:
    names = " ".join(
        f"-l {name[2:]}"
        if name.startswith("--")
        else f"-{'s' if len(name) == 2 else 'o'} {name[1:]}"
        for name in flag.names
    )
    if flag.choices:
        return f"{names} -x -a {_fish_quoted(' '.join(flag.choices))}"
    return f"{names} {'-r -F' if flag.is_path else '-x' * flag.takes_value}".rstrip()


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _paths(tree: Sequence[Place]) -> list[str]:
    return [place.path for place in tree if place.path]


def _with_paths(tree: Sequence[Place]) -> str:
    return "|".join(shlex.quote(place.path) for place in tree if place.takes_paths)


def _valued(tree: Sequence[Place]) -> Iterator[tuple[list[str], Flag]]:
    """Each flag that takes a value, with "PLACE:NAME" for each of its names."""
    for place in tree:
        for flag in place.flags:
            if flag.takes_value:
                yield [f"{place.path}:{name}" for name in flag.names], flag


def _words(place: Place) -> list[str]:
    commands = [name for name, _ in place.commands]
    return [*commands, *place.choices, *(name for flag in place.flags for name in flag.names)]


SCRIPTS: Mapping[str, Callable[[Sequence[Place]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
