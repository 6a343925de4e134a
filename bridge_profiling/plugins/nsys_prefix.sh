# Runs `nsys` with its first $1 arguments fitted to the nsys of this machine. $2: GPUs whose metrics to sample: "" for none,
# "all", or "local" for the one of this Slurm task.
# The rest of the arguments is the application; an empty last one comes from NeMo-Run and goes.
count=$1 gpus=$2; shift 2
if [ $# -gt 0 ] && [ -z "${@: -1}" ]; then set -- "${@:1:$#-1}"; fi
if [ "$gpus" = local ]; then gpus=${SLURM_LOCALID:-0}; fi
say() { echo "bridge_profiling: $*" >&2; }
known=$(timeout 60 nsys profile --help 2>&1) || { say "nsys does not run on $(hostname): $known"; exit 127; }
knows() { grep -qE -- "(^|[[:space:],])$1([=[:space:]]|$)" <<< "$known"; }
metrics=--gpu-metrics-devices; knows "$metrics" || metrics=--gpu-metrics-device
options=() report= before=
for argument in "${@:1:count}"; do
  name=${argument%%=*}
  case $argument in
    --gpu-metrics-device*=*) options+=("$metrics=${argument#*=}") ;;
    --*) if knows "$name"; then options+=("$argument"); else say "this nsys does not know $name: left out $argument"; fi ;;
    *) options+=("$argument") ;;
  esac
  case $before in -o) report=$argument ;; esac
  before=$argument
done
if [ -n "$gpus" ]; then
  devices=$(timeout 60 nsys profile "$metrics=help" true 2>&1)
  if grep -qE '^[[:space:]]*[0-9]+:' <<< "$devices"; then options+=("$metrics=$gpus")
  else say "no GPU metrics here: $(tail -n +2 <<< "$devices" | tr -s '[:space:]' ' ')"; fi
fi
# Not the usual two dollar signs: NeMo-Run's template makes one of them.
folder=$(dirname "$report") mark=$(dirname "$report")/.started.$BASHPID
[ -n "$report" ] && mkdir -p "$folder" && touch "$mark"
nsys "${options[@]}" "${@:count+1}" &
nsys=$!
trap 'kill -TERM $nsys' TERM INT
wait $nsys; code=$?
while kill -0 $nsys 2> /dev/null; do wait $nsys; code=$?; done
if [ -n "$report" ]; then
  if [ -z "$(find "$folder" -name '*.nsys-rep' -newer "$mark" 2> /dev/null)" ]; then
    say "nsys left no report under $folder: its capture range was never reached, or it was lost"
  fi
  rm -f "$mark"
fi
exit $code
