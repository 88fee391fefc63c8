# Sourced by the other scripts: Python environments for this checkout.
#
#   ensure ENVIRONMENT EXTRA...
#
# makes the folder ENVIRONMENT and installs the package into it, editable, with
# the extras. A stamp inside tells where and from what that was done, so that a
# second call costs two short processes. The stamp is written last: what was
# interrupted is done again.

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)

say() { echo "mpiring: $*" >&2; }

die() { say "$@"; exit 1; }

# Run a command; show what it writes only when it fails.
quietly() {
    local output
    output=$("$@" 2>&1) || { printf '%s\n' "$output" >&2; return 1; }
}

# $PYTHON, or python3, or a newer one beside a python3 that is too old.
find_python() {
    local name names=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
    [ -z "${PYTHON:-}" ] || names=("$PYTHON")
    for name in "${names[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not Python 3.10 or newer"
    die "no Python 3.10 or newer here: 'apt install python3 python3-venv', or set PYTHON"
}

make_environment() {
    local python version
    python=$(find_python) || exit 1
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "making $1 (Python $version)"
    # Debian and Ubuntu keep ensurepip, without which venv fails, in a package of its own.
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        quietly "$python" -m venv --clear "$1" || die "cannot make $1"
    elif "$python" -c 'import virtualenv' 2>/dev/null; then
        quietly "$python" -m virtualenv --clear "$1" || die "cannot make $1"
    else
        die "Python's venv is not complete here: 'apt install python$version-venv', then again"
    fi
}

# Whether an environment was made here, and its Python and packages still fit together.
usable() {
    "$1/bin/python" -I -c 'import pip, mpi4py' 2>/dev/null
}

ensure() {
    local environment=$root/$1 extra extras
    local stamp=$environment/mpiring-stamp checksum had_root='' had_checksum='' had_extras=''
    shift
    checksum=$(cat "$root/setup.cfg" "$root/pyproject.toml" | sha256sum)
    if [ -f "$stamp" ]; then
        { read -r had_root; read -r had_checksum; read -r had_extras; } <"$stamp"
    fi
    # Scripts in an environment name its absolute path, so a checkout that moved needs a new one.
    if [ "$had_root" != "$root" ] || ! usable "$environment"; then
        make_environment "$environment"
        had_checksum='' had_extras=''
    fi
    extras=$had_extras
    for extra; do
        case " $extras " in *" $extra "*) ;; *) extras="$extras $extra" ;; esac
    done
    [ "$checksum $extras" != "$had_checksum $had_extras" ] || return 0

    extras=${extras# }
    say "installing mpiring[${extras// /,}] into $environment"
    (
        cd "$root"
        # Settings that a user has for another Python do not fit this one.
        unset PYTHONPATH PYTHONHOME
        export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
        quietly "$environment/bin/python" -m pip install --editable ".[${extras// /,}]"
    ) || die "pip could not install it (its words are above)"
    printf '%s\n' "$root" "$checksum" "$extras" >"$stamp"
}
