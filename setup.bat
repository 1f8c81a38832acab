@echo off
rem Sets up the trainer on Windows and starts it: double-click it, or run  setup.bat COMMAND [options]
rem You can run it repeatedly: it keeps existing parts. `setup.bat help` lists the commands.
rem Delayed expansion stays off, so that a ! in a path is an ordinary character; every path is quoted.
setlocal EnableExtensions DisableDelayedExpansion
set "ROOT=%~dp0"
set "VENV=%ROOT%.venv"
set "OWN=%VENV%\Scripts\python.exe"
set "PIP_DISABLE_PIP_VERSION_CHECK=1"
set "PYTHONUTF8=1"
set "PYTHONSAFEPATH="
rem Other programs set these for a Python of their own, with which this one would not start, or load their packages.
set "PYTHONHOME="
set "PYTHONPATH="
set "CHECK=import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
set "PATH=%ROOT%.uv;%PATH%"
set "COMMAND=%~1"
set "CLICKED="
if "%COMMAND%"=="" set "CLICKED=1"
cd /d "%ROOT%"
if errorlevel 1 echo cmd cannot work in a folder of the network. Copy this one to a disk, or give its share a letter.& goto failed
if "%COMMAND%"=="" goto start
for %%c in (gui doctor demo install update help) do if /i "%COMMAND%"=="%%c" goto %%c
echo There is no command called %1.
set "FAILED=1"

:help
echo setup.bat                  install if needed, then open the page (http://127.0.0.1:7860)
echo setup.bat gui [options]    open the page; --help lists the options
echo setup.bat demo [options]   install if needed, then train a LoRA of a small model, and show what it learned
echo setup.bat doctor           check this machine: GPU, PyTorch, packages, compiling
echo setup.bat install          install or repair, and nothing else
echo setup.bat update           bring program and packages up to date (end trainings and the page first); your files stay
echo.
echo Environment variables: PYTHON=path to Python 3.11, 3.12 or 3.13; KOHYA_TORCH=cpu, cu126 or cu130
if defined FAILED exit /b 1
exit /b 0

:start
call :environment
if errorlevel 1 goto failed
"%OWN%" -m library.setup.installer ensure || goto failed
rem cmd reads this file line by line, and an update may replace it meanwhile: what follows a long command is on its line.
"%OWN%" -m kohya_gui && exit /b 0 || goto failed

:demo
call :environment
if errorlevel 1 goto failed
"%OWN%" -m library.setup.installer ensure || goto failed
"%OWN%" -m library.cli.main %* && exit /b 0 || goto ended

:gui
:doctor
if not exist "%OWN%" echo Nothing is installed yet. Run: setup.bat install& exit /b 1
"%OWN%" -m library.setup.installer need || exit /b 1
"%OWN%" -m library.cli.main %* && exit /b 0 || goto ended

:install
call :environment
if errorlevel 1 goto failed
"%OWN%" -m library.setup.installer again || goto failed
echo setup.bat opens the page.
exit /b 0

:update
call :environment
if errorlevel 1 goto failed
rem A block in brackets is read whole before it runs.
(
    "%OWN%" -m library.setup.installer update || exit /b 1
    "%OWN%" -m library.setup.installer again
    exit /b
)

:ended
exit /b %errorlevel%

:failed
echo.
echo The set-up stopped; see above.
if defined CLICKED pause
exit /b 1

rem ---- a Python of its own: by uv, else an installed one

:environment
if not exist "%OWN%" goto make
"%OWN%" -c "%CHECK%" 2>nul || goto make
rem An interruption leaves an environment with a part of pip. A crash has a negative number, which errorlevel overlooks.
"%OWN%" -m pip --version >nul 2>nul && exit /b 0
:make
if exist "%VENV%" rmdir /s /q "%VENV%"
if exist "%OWN%" echo "%VENV%" is in use. End the page and trainings, and run this again.& exit /b 1
echo.
echo [1/4] Python and its environment
if defined PYTHON goto given
call :find_uv
if not defined UV goto installed
rem In a folder of OneDrive, hard links fail.
"%UV%" venv --seed --link-mode copy --python 3.11 "%VENV%" && exit /b 0
:installed
for %%v in (3.11 3.12 3.13) do if not exist "%OWN%" py -%%v -m venv "%VENV%" 2>nul
if exist "%OWN%" exit /b 0
echo Python 3.11, 3.12 or 3.13 is needed. Install one from https://www.python.org and run this again.
exit /b 1
:given
set "PYTHON=%PYTHON:"=%"
"%PYTHON%" -c "%CHECK%" 2>nul || echo PYTHON is "%PYTHON%", which is not Python 3.11, 3.12 or 3.13.&& exit /b 1
"%PYTHON%" -m venv "%VENV%" && exit /b 0
echo PYTHON is "%PYTHON%", which cannot make an environment.
exit /b 1

:find_uv
set "UV="
rem Not the path that it prints: cmd reads it in the country's old encoding, which lacks most characters of names.
where /q uv.exe && set "UV=uv.exe"&& exit /b 0
if exist "%ROOT%.uv\uv.exe" set "UV=%ROOT%.uv\uv.exe"& exit /b 0
rem Astral's own installer, limited to this folder: it changes nothing else on this computer.
set "UV_UNMANAGED_INSTALL=%ROOT%.uv"
for /f "tokens=2 delims==" %%v in ('findstr /b "uv==" constraints.txt') do set "UV_VERSION=%%v"
powershell -NoProfile -ExecutionPolicy Bypass -Command "irm https://astral.sh/uv/%UV_VERSION%/install.ps1 | iex"
if exist "%ROOT%.uv\uv.exe" set "UV=%ROOT%.uv\uv.exe"
exit /b 0
