#!/usr/bin/env bash
# Starts this machine's part of a Ray cluster, which requires a token, and runs until it is interrupted.
#
#   first machine:   bash scripts/launch_cluster.sh head IP[:PORT] [OPTION..]
#   every other:     bash scripts/launch_cluster.sh worker HEAD_IP[:PORT] [OPTION..]
#   then, on one:    RAY_AUTH_MODE=token slimefsdp train CONFIG cluster.address=auto
#
# IP is the address at which the other machines reach the first one. The token is in ~/.ray/auth_token (or
# RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN); `head` makes a token if there is none, and the other machines need a copy of the
# token. Ray does not encrypt, so use a private network. An OPTION is an option of `ray start`, e.g. --min-worker-port
# 20000.
set -euo pipefail

usage() { sed -n '4,6s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[ $# -ge 2 ] || usage
role=$1 ip=${2%%:*} port=6379
case "$2" in *:*) port=${2##*:} ;; esac

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ray=$here/.venv/bin/ray
[ -x "$ray" ] || ray=ray
umask 077  # ray itself writes the token readable to everybody
export RAY_AUTH_MODE=token
# as in actors/cluster/connect.py: ranks get their share of cores, and objects are freed at once
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
export RAY_free_objects_period_milliseconds="${RAY_free_objects_period_milliseconds:-0}"
# --block: ray's processes end with this one, so a scheduler's kill leaves nothing behind
start=("$ray" start --block --disable-usage-stats)

token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [ -e "$token" ]; then chmod 600 "$token"; fi  # one that ray made by itself

case "$role" in
  head)
    "$ray" get-auth-token --generate >/dev/null
    echo "Other machines: copy the token, then  bash scripts/launch_cluster.sh worker $ip:$port"
    echo "Train:          RAY_AUTH_MODE=token slimefsdp train CONFIG cluster.address=$ip:$port"
    exec "${start[@]}" --head --node-ip-address "$ip" --port "$port" --include-dashboard false "${@:3}"
    ;;
  worker)
    "$ray" get-auth-token >/dev/null || {
      echo "scripts/launch_cluster.sh: no token here; copy ~/.ray/auth_token from $ip, mode 600" >&2
      exit 1
    }
    exec "${start[@]}" --address "$ip:$port" "${@:3}"
    ;;
  *) usage ;;
esac
