"""KV blocks below the device: host memory and disk, written behind the device's back and read before a request runs."""
