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
nsys "${options[@]}" "${@:count+1}" &
nsys=$!
trap 'kill -TERM $nsys' TERM INT
wait $nsys; code=$?
while kill -0 $nsys 2> /dev/null; do wait $nsys; code=$?; done
if [ -n "$mark" ]; then
  if [ -z "$(find "$folder" -name '*.nsys-rep' -newer "$mark" 2> /dev/null)" ]; then
    say "nsys left no report under $folder: its capture range was never reached, or it was lost"
  fi
  rm -f "$mark"
fi
exit $code
