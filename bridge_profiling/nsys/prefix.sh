# Runs `nsys` with its options adapted to the nsys of this machine. Arguments, as command.py writes them:
# $1: number of nsys' arguments. $2: option that samples GPU metrics, "" for none; its value "local" is the GPU of this Slurm task.
# $3: directory of the report, "" if none is named. $4: groups of names that versions gave one option: "a,b c,d".
# Then nsys' arguments, then the application's; an empty last one comes from NeMo-Run and is dropped.
count=$1 metrics=$2 folder=$3 renamed=$4; shift 4
if [ $# -gt 0 ] && [ -z "${@: -1}" ]; then set -- "${@:1:$#-1}"; fi
say() { echo "bridge_profiling: $*" >&2; }
help=$(timeout 60 nsys profile --help 2>&1) || { say "nsys does not run on $(hostname): $help"; exit 127; }
knows() { grep -qE -- "(^|[[:space:],])$1([=[:space:]]|$)" <<< "$help"; }
# The name that this nsys knows option $1 by; nothing and a failure if it has no such option.
name_of() {
  local names=$1 group
  for group in $renamed; do case ",$group," in *",$1,"*) names="$1 ${group//,/ }" ;; esac; done
  for name in $names; do if knows "$name"; then echo "$name"; return; fi; done
  return 1
}
options=()
for argument in "${@:1:count}"; do
  asked=${argument%%=*}
  case $argument in
    --*)
      if name=$(name_of "$asked"); then options+=("$name${argument#"$asked"}")
      else say "this nsys does not know $asked: left out $argument"; fi ;;
    *) options+=("$argument") ;;
  esac
done
if [ -n "$metrics" ]; then
  gpus=${metrics#*=} metrics=${metrics%%=*}
  if [ "$gpus" = local ]; then gpus=${SLURM_LOCALID:-0}; fi
  if name=$(name_of "$metrics"); then metrics=$name; fi
  devices=$(timeout 60 nsys profile "$metrics=help" true 2>&1)
  if grep -qE '^[[:space:]]*[0-9]+:' <<< "$devices"; then options+=("$metrics=$gpus")
  else say "no GPU metrics here: $(tail -n +2 <<< "$devices" | tr -s '[:space:]' ' ')"; fi
fi
mark=
[ -n "$folder" ] && mkdir -p "$folder" && mark=$(mktemp "$folder/.started.XXXXXXXX")
app= stopped= nsys=
stop() { stopped=yes; kill -TERM $nsys 2> /dev/null || { [ -n "$app" ] && kill -TERM "$app" 2> /dev/null; }; }
trap stop TERM INT
runs() { grep -qs '^State:[[:space:]]*[^ZX]' "/proc/$1/status"; }
# nsys' agents that start at the same moment lose each other: the lock is the one of supervisor.py, which says more.
lock() {
  local place=${TMPDIR:-/tmp}/bridge_profiling-$UID polls=0
  command -v flock > /dev/null || return
  mkdir -m 700 "$place" 2> /dev/null
  [ -O "$place" ] && [ ! -L "$place" ] && exec 9> "$place/nsys.lock" || return
  until flock -n 9 || [ -n "$stopped" ] || ((++polls > 900)); do sleep 0.2; done
}
# An nsys that is terminated while it starts leaves its agent, which waits for it forever. The name of the agent's session has the
# process id of nsys. $1: for how many 0.1 s the agent may end by itself.
end_agent() {
  local each polls
  for ((polls = 0; polls <= $1; polls++)); do
    each=$(grep -lsxzF -- "profile-$nsys" /proc/[0-9]*/cmdline)
    [ -n "$each" ] || return
    [ "$polls" = "$1" ] || sleep 0.1
  done
  for each in $each; do
    if grep -qsxzF -- --start-agent "$each"; then each=${each#/proc/}; kill -KILL "${each%/cmdline}" 2> /dev/null; fi
  done
}
# Each start has a script of its own, which names the application's process in a file that only one can create: the one that comes
# first, the application or this script, which withdraws a start after nsys has ended without it.
starts=$(mktemp -d) || starts=
for attempt in 1 2 3; do
  begin=()
  if [ -n "$starts" ]; then
    begun=$starts/$attempt.pid begin=(bash "$starts/$attempt")
    echo '{ set -C; echo $$ > "$0.pid"; read -r by < "$0.pid"; } 2> /dev/null; [ "$by" != withdrawn ] && exec "$@"' > "${begin[1]}"
    lock 2> /dev/null
    if [ -n "$stopped" ]; then code=143; break; fi
  fi
  nsys "${options[@]}" "${begin[@]}" "${@:count+1}" 9>&- &
  nsys=$!
  if [ -n "$starts" ]; then
    for ((polls = 0; polls < 600; polls++)); do
      if [ -s "$begun" ] || ! kill -0 $nsys 2> /dev/null; then break; fi
      sleep 0.1
    done
    sleep 0.3
    exec 9>&-
    [ -s "$begun" ] && app=$(< "$begun")
  fi
  wait $nsys; code=$?
  while kill -0 $nsys 2> /dev/null; do wait $nsys; code=$?; done
  if [ -z "$starts" ] || [ -n "$stopped" ] || ! (set -C; echo withdrawn > "$begun") 2> /dev/null; then break; fi
  say "nsys ended with code $code before the application ran (start $attempt of 3)"
  end_agent 0
  if [ "$attempt" = 3 ]; then
    say "the application runs without nsys"
    rm -rf "$starts" ${mark:+"$mark"}
    export BRIDGE_PROFILING_NSYS_REFUSED="nsys ended 3 times before the application ran, with code $code"
    exec "${@:count+1}"
  fi
done
if [ -n "$starts" ]; then app=$(cat "$begun" 2> /dev/null); rm -rf "$starts"; fi
if [ -z "$stopped" ] && [ -n "$app" ] && runs "$app"; then
  say "nsys ended with code $code, and the application goes on without it; its own exit code gets lost"
  while runs "$app"; do sleep 1; done
  code=1
fi
end_agent 50
if [ -n "$mark" ]; then
  if [ -z "$(find "$folder" -name '*.nsys-rep' -newer "$mark" 2> /dev/null)" ]; then
    say "nsys left no report under $folder: its capture range was never reached, or it was lost"
  fi
  rm -f "$mark"
fi
exit $code
