module orchard.agent

go 1.25
