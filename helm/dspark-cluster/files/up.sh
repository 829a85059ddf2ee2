#!/usr/bin/env bash
# up.sh CONFIG RUN HOST PORT: see to it that a gateway serves at HOST:PORT, of a cluster with the settings CONFIG.
#
# Ray runs `dspark-cluster up CONFIG` once, as the job RUN, and this waits for its end. Who asks again waits for the same
# run, so this may be interrupted and repeated. What failed, or serves no longer, is run anew; a head that was lost has
# forgotten its runs. Another RUN takes the place of the cluster that is there.
set -euo pipefail
config=$1 run=$2 host=$3 port=$4

state() { # of the run, as Ray tells it
    ray job status "$run" 2>&1 || true
}

serves() { # whether the port is open, or comes to be within three minutes: a pod may have been moved
    for _ in {1..36}; do
        if (: <"/dev/tcp/$host/$port") 2>/dev/null; then return 0; fi
        sleep 5
    done
    return 1
}

until ray job list >/dev/null 2>&1; do
    echo "waiting for Ray at $RAY_API_SERVER_ADDRESS"
    sleep 5
done

case $(state) in
*PENDING* | *RUNNING*) ;;
*SUCCEEDED*)
    if serves; then exit 0; fi
    ray job delete "$run"
    ;;
*FAILED* | *STOPPED*) ray job delete "$run" ;;
esac

if [[ $(state) != *@(PENDING|RUNNING)* ]]; then
    # The file of this pod, which may be newer than the head's.
    folder=$(mktemp -d)
    cp -L "$config" "$folder/cluster.yaml"
    # It fails where another has submitted it since.
    ray job submit --no-wait --submission-id "$run" --working-dir "$folder" -- \
        bash -c 'dspark-cluster down && dspark-cluster up cluster.yaml' || state
fi
ray job logs --follow "$run"
[[ $(state) == *SUCCEEDED* ]]
