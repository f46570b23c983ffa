# Copies gemma to %LOCALAPPDATA%\Programs\gemma, and adds that directory to the user's PATH.
$ErrorActionPreference = 'Stop'
$target = Join-Path $env:LOCALAPPDATA 'Programs\gemma'
New-Item -ItemType Directory -Force $target | Out-Null
Copy-Item -Recurse -Force (Join-Path $PSScriptRoot '*') $target

# Variables in the PATH stay variables.
$key = 'HKCU:\Environment'
$path = (Get-Item $key).GetValue('Path', '', 'DoNotExpandEnvironmentNames')
if (($path -split ';') -notcontains $target) {
    $path = (@($path -split ';' | Where-Object { $_ }) + $target) -join ';'
    Set-ItemProperty $key Path $path -Type ExpandString
    # Removing a variable tells running programs that the environment changed.
    [Environment]::SetEnvironmentVariable('GEMMA_INSTALLED', $null, 'User')
}
"gemma is in $target. A new terminal finds it."
