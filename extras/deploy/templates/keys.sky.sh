for role in ${roles[$SKYPILOT_NODE_RANK]}; do unpack "$role" "ROLLMILL_KEYS_${role^^}"; done
unset @names@
export ROLLMILL_KEYS="$HOME/rollmill-keys"
