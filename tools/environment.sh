#!/bin/sh
# Makes a virtual environment with a Python that this project supports, and prints which.
#
#     sh tools/environment.sh DIRECTORY [PYTHON]
#
# PYTHON: a version (3.13), a command or a path. Without it the first of 3.12 and 3.13 that starts: 3.12 is the newest on
# which everything runs (Megatron Bridge 0.6 and nvidia-resiliency-ext have no release for 3.13).
# An environment that exists stays, unless another PYTHON is asked for. DIRECTORY/.created is touched when one is made.
set -eu
directory=$1 asked=${2:-}

# The interpreter's version, if it starts and can make environments: a shim of pyenv may exist and fail.
version_of() {
    "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2> /dev/null
}

# Interpreters of a version, where one looks for them; pyenv's own, since its shims work for the chosen version only.
candidates() {
    command -v "python$1" || true
    ls -d "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python 2> /dev/null | sort -rV
    for other in "/usr/local/bin/python$1" "/usr/bin/python$1" python3; do command -v "$other" || true; done
}

find_python() {
    for version in "$@"; do
        candidates "$version" | while IFS= read -r candidate; do
            if [ "$(version_of "$candidate")" = "$version" ]; then
                echo "$candidate"
                break
            fi
        done | grep . && return
    done
    return 1
}

fail() {
    echo "error: $1" >&2
    exit 2
}

if [ -z "$asked" ] && [ -e "$directory/.created" ]; then
    exit 0
fi
case $asked in
    '') python=$(find_python 3.12 3.13) || fail "no Python 3.12 or 3.13 with venv and ensurepip (Debian: apt install python3-venv). Type: make PYTHON=/path/to/python3.12 …" ;;
    [0-9]*) python=$(find_python "$(echo "$asked" | cut -d. -f1,2)") || fail "no Python $asked with venv and ensurepip. Type: make PYTHON=/path/to/python3.12 …" ;;
    *) python=$asked ;;
esac
version=$(version_of "$python") \
    || fail "$python does not start, or lacks the modules venv and ensurepip. Type: make PYTHON=/path/to/python3.12 …"
case $version in
    3.12 | 3.13) ;;
    *) fail "$python is Python $version, not 3.12 or 3.13. Type: make PYTHON=/path/to/python3.12 …" ;;
esac
same='import sys; print(sys.base_prefix, *sys.version_info[:3])'
if [ -e "$directory/.created" ] && [ "$("$directory/bin/python" -c "$same" 2> /dev/null)" = "$("$python" -c "$same")" ]; then
    exit 0
fi
echo "Python $version: $python"
"$python" -m venv --clear "$directory"
touch "$directory/.created"
