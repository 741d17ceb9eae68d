unpack() { # ROLE VARIABLE: the keys of one role, from SkyPilot's secret
  install --directory --mode=700 "$HOME/rollmill-keys/$1"
  base64 --decode <<<"${!2}" | tar --extract --gzip --directory "$HOME/rollmill-keys/$1"
}
