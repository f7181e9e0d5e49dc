#!/usr/bin/env bash
# The patch series as commits and back.
#
#   series.sh apply DIR     make DIR (the unpacked source of UPSTREAM's tag) a git tree and apply
#                           the series to it, one commit a patch, no fuzz
#   series.sh refresh DIR   write the commits of DIR above its upstream state back to patches/ and series
#   series.sh check DIR     DIR stays as it is: a copy of it survives apply and refresh without any
#                           change here, and every patch is listed, present and well-formed
#   series.sh budget        upstream lines and files that each patch touches, and all together
#
# Patches carry two lines of context: enough to be found, little to go stale.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
patches=${POLYKV_PATCHES:-$here/patches}
series=${POLYKV_SERIES:-$here/series}
base=upstream-base # git tag of the pristine source inside a tree

# nobody's git configuration may shape the patches
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
export GIT_COMMITTER_NAME="polykv-proxy maintainers" GIT_COMMITTER_EMAIL=maintainers@polykv-proxy.invalid

die() {
    echo "series.sh: $*" >&2
    exit 1
}

listed() { sed -e 's/#.*//' -e '/^[[:space:]]*$/d' -e 's/[[:space:]]*$//' "$series"; }

in_tree() { git -C "$tree" -c core.abbrev=7 -c core.autocrlf=false -c commit.gpgsign=false "$@"; }

need_tree() {
    [ -n "${1:-}" ] || die "a source directory is needed"
    [ -f "$1/CMakeLists.txt" ] || die "$1 is not a llama.cpp source tree"
    tree=$(cd "$1" && pwd)
}

apply() {
    need_tree "${1:-}"
    # a .git of its own: DIR may well lie inside another repository
    if [ ! -e "$tree/.git" ]; then
        in_tree init -q -b main
        in_tree add -A -f
        GIT_AUTHOR_NAME=upstream GIT_AUTHOR_EMAIL=upstream@invalid in_tree commit -q -m "upstream $(tag)"
    fi
    [ -z "$(in_tree status --porcelain --untracked-files=no)" ] || die "$tree has uncommitted changes"
    in_tree tag -f "$base" >/dev/null
    local name
    for name in $(listed); do
        if ! in_tree am -q --keep-cr --keep-non-patch --whitespace=nowarn --no-3way "$patches/$name"; then
            cat >&2 <<END
series.sh: $name does not apply. To go on:
  1. git -C $tree apply --reject --whitespace=nowarn $patches/$name   # then mend what *.rej shows
  2. git -C $tree add -A && git -C $tree am --continue, and the rest of the series with git am
  3. $here/series.sh refresh $tree
END
            exit 1
        fi
    done
}

refresh() {
    need_tree "${1:-}"
    in_tree rev-parse -q --verify "$base^{commit}" >/dev/null || die "$tree was not made by 'series.sh apply'"
    local fresh new file name
    fresh=$(mktemp -d)
    new=$(mktemp)
    # shellcheck disable=SC2064
    trap "rm -rf '$fresh' '$new'" RETURN
    in_tree format-patch -q -U2 --zero-commit --no-signature --no-numbered --no-stat --no-renames \
        --filename-max-length=200 --diff-algorithm=myers -o "$fresh" "$base"..HEAD
    sed -n '/^#/p;/^[^#]/q' "$series" >"$new"
    mkdir -p "$patches"
    rm -f "$patches"/*.patch
    for file in "$fresh"/*.patch; do
        [ -e "$file" ] || break
        name=$(basename "$file")
        name=${name#[0-9][0-9][0-9][0-9]-}
        mv "$file" "$patches/$name"
        echo "$name" >>"$new"
    done
    # comments between names are the editor's; a series that says the same is left as it is
    if [ "$(listed)" != "$(sed '/^#/d' "$new")" ]; then cp "$new" "$series"; fi
}

headers() {
    local name trailer
    [ -z "$(listed | sort | uniq -d)" ] || die "listed twice: $(listed | sort | uniq -d)"
    for name in $(listed); do
        [ -f "$patches/$name" ] || die "$name is listed and missing"
        for trailer in Kind Upstream Signed-off-by; do
            sed '/^diff --git/q' "$patches/$name" | grep -q "^$trailer: ." || die "$name has no $trailer: line"
        done
        sed '/^diff --git/q' "$patches/$name" | grep -qE '^Kind: (backport|pending|ours)$' ||
            die "$name: Kind must be backport, pending or ours"
    done
    for name in "$patches"/*.patch; do
        listed | grep -qxF "$(basename "$name")" || die "$(basename "$name") is not in series"
    done
}

check() {
    need_tree "${1:-}"
    headers
    local work
    work=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    cp -a "$tree" "$work/tree"
    rm -rf "$work/tree/.git"
    cp -a "$patches" "$work/patches"
    cp "$series" "$work/series"
    POLYKV_PATCHES=$work/patches POLYKV_SERIES=$work/series "$0" apply "$work/tree"
    POLYKV_PATCHES=$work/patches POLYKV_SERIES=$work/series "$0" refresh "$work/tree"
    diff -r "$patches" "$work/patches" && diff "$series" "$work/series" ||
        die "refresh changes the series: run 'series.sh refresh' and review"
}

# Lines of files that exist upstream: a run of changes counts its inserted or its removed lines,
# whichever are more (a modified line is one of each). Files that the series itself adds are ours.
budget() {
    local name paths=()
    for name in $(listed); do paths+=("$patches/$name"); done
    [ ${#paths[@]} -gt 0 ] || { printf '%5d lines %3d files  %s\n' 0 0 total; return; }
    awk '
        function close_run() { lines[patch] += plus > minus ? plus : minus; plus = minus = 0 }
        function touch() { if (!((patch, file) in seen)) { seen[patch, file]; files[patch]++ }
                           if (!(file in all)) { all[file]; n_all++ } }
        FNR == 1 { close_run(); patch = FILENAME; sub(/.*\//, "", patch); order[++n] = patch; left = right = 0 }
        left <= 0 && right <= 0 && /^diff --git / { close_run(); file = ""; fresh = 0; next }
        left <= 0 && right <= 0 && /^--- / { fresh = ($2 == "/dev/null"); next }
        left <= 0 && right <= 0 && /^\+\+\+ / { file = substr($2, 3); if (fresh) ours[file]; next }
        left <= 0 && right <= 0 && /^@@ / {
            close_run(); split($2, a, ","); split($3, b, ",")
            left = a[2] == "" ? 1 : a[2]; right = b[2] == "" ? 1 : b[2]; next
        }
        left > 0 || right > 0 {
            mark = substr($0, 1, 1)
            if (mark == "\\") next
            if (mark == "+") right--; else if (mark == "-") left--; else { left--; right-- }
            if (file in ours) next
            if (mark == "+") { plus++; touch() } else if (mark == "-") { minus++; touch() } else close_run()
        }
        END {
            close_run()
            for (i = 1; i <= n; i++) {
                printf "%5d lines %3d files  %s\n", lines[order[i]], files[order[i]], order[i]
                total += lines[order[i]]
            }
            printf "%5d lines %3d files  total\n", total, n_all
        }' "${paths[@]}"
}

tag() { sed -n 's/^tag=//p' "$here/UPSTREAM"; }

case ${1:-} in
apply | refresh | check) "$1" "${2:-}" ;;
budget) budget ;;
*)
    sed -n '2,/^set /{/^set /!p;}' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
    ;;
esac
