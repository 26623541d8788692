"""The demo's story: pods come one after the other, and what gpushare does about them is told as it happens."""
